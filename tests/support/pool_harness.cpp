// Hammers threads.h; returns 0, or the line of the first check that failed. Built by tests/unit/kernels/test_threads.py.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "threads.h"

using namespace anabranch;

#define CHECK(condition) \
  if (!(condition)) return __LINE__

namespace {

// Every task runs once, with a thread index in range, and no two tasks share an index at a time.
int run_each_task_once(int num_threads, int num_tasks, int num_runs) {
  ThreadPool pool(num_threads);
  std::vector<std::atomic<int>> runs(num_tasks);
  std::vector<std::atomic<int>> busy(num_threads);
  std::atomic<int> bad{0};
  for (int i = 1; i <= num_runs; ++i) {
    pool.parallel_for(num_tasks, [&](int task, int thread) {
      if (thread < 0 || thread >= num_threads || busy[thread].fetch_add(1) != 0) bad.fetch_add(1);
      runs[task].fetch_add(1);
      busy[thread].fetch_sub(1);
    });
    for (int t = 0; t < num_tasks; ++t) CHECK(runs[t].load() == i);
  }
  CHECK(bad.load() == 0);
  return 0;
}

}  // namespace

extern "C" {

int harness_tasks() {
  for (int num_threads : {1, 2, 3, 5}) {
    for (int num_tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      if (const int line = run_each_task_once(num_threads, num_tasks, num_tasks > 100 ? 100 : 1000)) return line;
    }
  }
  return 0;
}

// Results written by tasks are visible after the loop, also after workers have gone to sleep.
int harness_sleep() {
  ThreadPool pool(3);
  for (int i = 0; i < 20; ++i) {
    std::vector<int> out(100, 0);
    pool.parallel_for(100, [&](int task, int) { out[task] = task + i; });
    for (int t = 0; t < 100; ++t) CHECK(out[t] == t + i);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return 0;
}

// A task may run a loop itself: inline, with the index of its own thread.
int harness_nested() {
  ThreadPool pool(3);
  std::atomic<int> sum{0}, bad{0};
  pool.parallel_for(10, [&](int, int thread) {
    pool.parallel_for(5, [&](int inner, int inner_thread) {
      if (inner_thread != thread) bad.fetch_add(1);
      sum.fetch_add(inner);
    });
  });
  CHECK(sum.load() == 100 && bad.load() == 0);
  return 0;
}

// A thread held up in one task leaves its other tasks to the rest.
int harness_straggler() {
  ThreadPool pool(2);
  std::atomic<int> num_done{0};
  // The first loop traps whichever thread takes the first task until the other one has done all the rest.
  pool.parallel_for(50, [&](int task, int) {
    if (task == 0) {
      while (num_done.load() < 49) std::this_thread::yield();
    }
    num_done.fetch_add(1);
  });
  CHECK(num_done.load() == 50);
  return 0;
}

// Several threads of the process use the one pool: they take turns.
int harness_lease() {
  std::atomic<int> inside{0}, bad{0}, sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        PoolLease pool;
        if (inside.fetch_add(1) != 0) bad.fetch_add(1);
        pool->parallel_for(8, [&](int, int) { sum.fetch_add(1); });
        inside.fetch_sub(1);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(bad.load() == 0 && sum.load() == 4 * 200 * 8);
  return 0;
}

// Several pools at once, made and destroyed while others work.
int harness_pools() {
  std::vector<std::thread> callers;
  std::atomic<int> sum{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 30; ++i) {
        ThreadPool pool(2);
        for (int run = 0; run < 20; ++run) pool.parallel_for(6, [&](int, int) { sum.fetch_add(1); });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(sum.load() == 3 * 30 * 20 * 6);
  return 0;
}

int harness_sum(int num_tasks) {
  PoolLease pool;
  std::atomic<int> sum{0};
  pool->parallel_for(num_tasks, [&](int task, int) { sum.fetch_add(task); });
  return sum.load();
}

// Barriers that stall make the pool go on with one thread, and come back later.
int harness_inflated() {
  ThreadPool pool(2);
  auto step = [&](bool is_stalled) {
    pool.begin_step();
    pool.parallel_for(2, [&](int, int thread) {
      if (is_stalled && thread == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (thread == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
    pool.end_step();
  };
  int num_stalled = 0;
  while (pool.num_active() == 2 && num_stalled < 200) {
    step(true);
    ++num_stalled;
  }
  CHECK(pool.num_active() == 1);
  CHECK(pool.stats().num_inflated_steps == 2);
  int num_single = 0;
  while (pool.num_active() == 1 && num_single < 2000) {
    step(true);
    ++num_single;
  }
  CHECK(pool.num_active() == 2 && num_single > 1 && pool.stats().num_single_steps == uint64_t(num_single));
  for (int i = 0; i < 10; ++i) step(false);
  CHECK(pool.num_active() == 2);
  return 0;
}
}
