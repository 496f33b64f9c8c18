// A fork-join thread pool whose barriers cost a fraction of a microsecond, and which never waits for a thread that has not started.
//
//   PoolLease pool;                                        // the process's pool, exclusively, until the end of the scope
//   pool->parallel_for(num_tasks, [&](int task, int thread) { ... });
//
// Task t starts out belonging to thread t * num_threads / num_tasks, so that a thread walks neighbouring tasks in ascending order
// (weights stream linearly); a thread that runs out takes tasks from the others. Which thread runs a task must never show in its result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <utility>

namespace anabranch {

uint64_t monotonic_ns();

class ThreadPool {
 public:
  // num_threads counts the caller. Workers start at the first parallel_for.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Threads that the next parallel_for uses: num_threads(), or 1 while steps are inflated (see end_step).
  int num_active() const { return active_; }

  // Run f(task, thread) for every task in [0, num_tasks), and return when all are done. 0 <= thread < num_threads(), and no two
  // tasks run on one `thread` at a time. Called by the lease holder; a call from inside a task runs inline on that thread.
  template <class F>
  void parallel_for(int num_tasks, F&& f) {
    using Function = std::remove_reference_t<F>;
    if (num_tasks <= 1 || active_ == 1 || is_inside()) {
      const int thread = current_thread();
      for (int task = 0; task < num_tasks; ++task) f(task, thread);
      return;
    }
    run(num_tasks, [](void* context, int task, int thread) { (*static_cast<Function*>(context))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

  // Uninitialised memory of `thread`, 64-byte aligned, at least num_bytes; valid until that thread asks again.
  void* scratch(int thread, size_t num_bytes);

  // Bracket one forward. When barriers stall (another process holds a core, so one of our threads waits for the scheduler's tick
  // while holding a task) end_step switches to one thread for a while, then tries again. Results do not depend on it.
  void begin_step();
  void end_step();

  struct Stats {
    uint64_t num_steps, num_inflated_steps, num_single_steps, stalled_ns;
  };
  const Stats& stats() const { return stats_; }

 private:
  using Task = void (*)(void* context, int task, int thread);
  struct alignas(128) Range {
    std::atomic<uint64_t> span{0};  // next task << 32 | end: tasks nobody has taken yet
  };
  struct Scratch {
    void* data = nullptr;
    size_t num_bytes = 0;
  };

  static bool is_inside();
  static int current_thread();
  void run(int num_tasks, Task task, void* context);
  int take_tasks(int thread);
  void start_workers();
  void worker_loop(int thread);

  const int num_threads_;
  int active_;
  bool started_ = false;
  Range* ranges_;
  Scratch* scratch_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  alignas(128) std::atomic<uint32_t> epoch_{0};      // grows with every run; workers sleep on it
  std::atomic<uint32_t> num_sleeping_{0};
  std::atomic<bool> stop_{false};
  alignas(128) std::atomic<int32_t> num_unfinished_{0};  // tasks not done; the caller sleeps on it
  std::atomic<uint32_t> caller_sleeps_{0};
  std::atomic<int32_t> num_alive_{0};

  Stats stats_{};
  uint64_t step_start_ns_ = 0, step_stalled_ns_ = 0, single_until_ns_ = 0, penalty_ns_ = 0;
  int num_strikes_ = 0, good_steps_ = 0;
};

// The pool of the process, held exclusively. Forked children get a fresh one.
class PoolLease {
 public:
  PoolLease();
  ThreadPool* operator->() const { return pool_; }
  ThreadPool& operator*() const { return *pool_; }

 private:
  std::unique_lock<std::mutex> hold_;
  ThreadPool* pool_;
};

}  // namespace anabranch

extern "C" {
// Threads used from the next native call on, the caller included. Returns the number set (at least 1).
int anb_set_num_threads(int num_threads);
int anb_num_threads();
void anb_pool_stats(uint64_t* out);
}
