#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <set>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anabranch {
namespace {

constexpr int kSpins = 2000;                 // pauses before sleeping: about 100 us, longer than any gap inside a step
constexpr uint64_t kStallNs = 100'000;       // a barrier this long may be a lost core: tasks of a decode step take some 10 us
constexpr uint64_t kInflatedNs = 400'000;    // stalls of a step that matter, if they are also half of it
constexpr uint64_t kMinPenaltyNs = 100'000'000, kMaxPenaltyNs = 2'000'000'000;  // time on one thread
constexpr int kForgetSteps = 64;

thread_local int tls_thread = 0;
thread_local bool tls_inside = false;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)

template <class T>
void wait_on(std::atomic<T>* word, T expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, static_cast<uint32_t>(expected), nullptr, nullptr, 0);
}

template <class T>
void wake_all(std::atomic<T>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

#else  // callers check again whatever woke them

template <class T>
void wait_on(std::atomic<T>*, T) {
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

template <class T>
void wake_all(std::atomic<T>*) {}

#endif

constexpr uint64_t pack_span(uint32_t next, uint32_t end) { return uint64_t(next) << 32 | end; }

}  // namespace

uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads), active_(num_threads_) {
  ranges_ = new Range[num_threads_];
  scratch_ = new Scratch[num_threads_];
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  wake_all(&epoch_);
  while (num_alive_.load() > 0) sched_yield();
  for (int i = 0; i < num_threads_; ++i) std::free(scratch_[i].data);
  delete[] scratch_;
  delete[] ranges_;
}

bool ThreadPool::is_inside() { return tls_inside; }
int ThreadPool::current_thread() { return tls_thread; }

void* ThreadPool::scratch(int thread, size_t num_bytes) {
  Scratch& s = scratch_[thread];
  if (s.num_bytes < num_bytes) {
    std::free(s.data);
    s.num_bytes = 0;
    const size_t wanted = (num_bytes + 4095) & ~size_t(4095);
    s.data = std::aligned_alloc(64, wanted);
    if (s.data == nullptr) throw std::bad_alloc();
    s.num_bytes = wanted;
  }
  return s.data;
}

void ThreadPool::start_workers() {
  started_ = true;
  for (int thread = 1; thread < num_threads_; ++thread) {
    num_alive_.fetch_add(1);
    std::thread([this, thread] { worker_loop(thread); }).detach();
  }
}

// Take tasks, own ones first, until none is left anywhere. Returns how many were run.
//
// A claim is one compare-and-swap on (next, end). It can only succeed while the current run has tasks left, hence while its caller
// still waits, so task_ and context_ are read after it and are always those of the run that the task belongs to.
int ThreadPool::take_tasks(int thread) {
  int num_done = 0;
  tls_inside = true;
  for (int i = 0; i < num_threads_; ++i) {
    std::atomic<uint64_t>& span = ranges_[(thread + i) % num_threads_].span;
    uint64_t seen = span.load(std::memory_order_acquire);
    while (uint32_t(seen >> 32) < uint32_t(seen)) {
      if (!span.compare_exchange_weak(seen, seen + (uint64_t(1) << 32), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      task_(context_, int(seen >> 32), thread);
      ++num_done;
      seen = span.load(std::memory_order_acquire);
    }
  }
  tls_inside = false;
  return num_done;
}

void ThreadPool::run(int num_tasks, Task task, void* context) {
  if (!started_) start_workers();
  task_ = task;
  context_ = context;
  num_unfinished_.store(num_tasks, std::memory_order_relaxed);
  for (int t = 0; t < num_threads_; ++t) {
    const auto begin = uint32_t(uint64_t(num_tasks) * t / num_threads_), end = uint32_t(uint64_t(num_tasks) * (t + 1) / num_threads_);
    ranges_[t].span.store(pack_span(begin, end), std::memory_order_release);
  }
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) > 0) wake_all(&epoch_);

  const int num_done = take_tasks(0);
  if (num_unfinished_.fetch_sub(num_done, std::memory_order_acq_rel) == num_done) return;

  uint64_t wait_start = 0;
  for (int spins = 0; num_unfinished_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins == 64) wait_start = monotonic_ns();  // short waits are not worth a clock read
    if (spins < kSpins) {
      pause();
      continue;
    }
    caller_sleeps_.store(1, std::memory_order_seq_cst);
    const int32_t left = num_unfinished_.load(std::memory_order_seq_cst);
    if (left != 0) wait_on(&num_unfinished_, left);
    caller_sleeps_.store(0, std::memory_order_relaxed);
  }
  if (wait_start != 0) {
    const uint64_t waited = monotonic_ns() - wait_start;
    if (waited > kStallNs) step_stalled_ns_ += waited;
  }
}

void ThreadPool::worker_loop(int thread) {
  tls_thread = thread;
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < kSpins) {
        pause();
        continue;
      }
      num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) == seen) wait_on(&epoch_, seen);
      num_sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) break;
    const int num_done = take_tasks(thread);
    if (num_done == 0) continue;
    const bool is_last = num_unfinished_.fetch_sub(num_done, std::memory_order_seq_cst) == num_done;
    if (is_last && caller_sleeps_.load(std::memory_order_seq_cst) != 0) wake_all(&num_unfinished_);
  }
  num_alive_.fetch_sub(1);
}

void ThreadPool::begin_step() {
  step_start_ns_ = monotonic_ns();
  step_stalled_ns_ = 0;
}

// A caller that waits for half of a step would be done as soon alone: the worker sits on a core that something else has half of. (A
// tenth is not enough: the tasks of a prefill take a millisecond each, and their ends do not meet.)
//
// Two inflated steps with fewer than kForgetSteps good ones between them send the pool to one thread. While a relapse follows soon, each
// stay is twice as long as the last, so that under a steady load few steps are lost to trying. Stays are times, not numbers of steps: a
// step takes from 3 ms to half a second.
void ThreadPool::end_step() {
  ++stats_.num_steps;
  if (num_threads_ == 1) return;
  const uint64_t now = monotonic_ns();
  if (active_ == 1) {
    ++stats_.num_single_steps;
    if (now >= single_until_ns_) active_ = num_threads_;
    return;
  }
  const bool is_inflated = step_stalled_ns_ > kInflatedNs && step_stalled_ns_ * 2 > now - step_start_ns_;
  stats_.stalled_ns += step_stalled_ns_;
  stats_.num_inflated_steps += is_inflated;
  if (!is_inflated) {
    if (++good_steps_ >= kForgetSteps) num_strikes_ = 0, penalty_ns_ = 0;
    return;
  }
  good_steps_ = 0;
  if (++num_strikes_ < 2) return;
  penalty_ns_ = penalty_ns_ == 0 ? kMinPenaltyNs : std::min(penalty_ns_ * 2, kMaxPenaltyNs);
  single_until_ns_ = now + penalty_ns_;
  active_ = 1;
}

namespace {

std::mutex* pool_mutex = new std::mutex;  // never destroyed: the pool must outlive every static destructor
ThreadPool* process_pool = nullptr;
int wanted_threads = 0;

// The child of a fork has no workers, and a mutex that another thread of the parent may have held: start afresh.
void forget_pool() {
  pool_mutex = new std::mutex;
  process_pool = nullptr;
  tls_inside = false;
  tls_thread = 0;
}

const int at_fork_registered = pthread_atfork(nullptr, nullptr, forget_pool);

#if defined(__linux__)

std::string first_line(const std::string& path) {
  char line[256] = "";
  if (FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fgets(line, sizeof line, file) == nullptr) line[0] = 0;
    std::fclose(file);
  }
  return line;
}

// Cores that this process may run on: hyperthreads of one core count once, since each of our threads fills its core.
int allowed_cores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return int(std::thread::hardware_concurrency());
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string siblings = first_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
  }
  return int(cores.size());
}

// What a container's quota of CPU time comes to, rounded up.
int quota_cores() {
  long long quota, period;
  if (std::sscanf(first_line("/sys/fs/cgroup/cpu.max").c_str(), "%lld %lld", &quota, &period) != 2 || period <= 0) return 1 << 20;
  return int(std::max<long long>(1, (quota + period - 1) / period));
}

int usable_cores() { return std::max(1, std::min(allowed_cores(), quota_cores())); }

#else

int usable_cores() { return std::max(1, int(std::thread::hardware_concurrency())); }

#endif

}  // namespace

PoolLease::PoolLease() : hold_(*pool_mutex) {
  if (process_pool == nullptr) process_pool = new ThreadPool(wanted_threads > 0 ? wanted_threads : usable_cores());
  pool_ = process_pool;
}

}  // namespace anabranch

using namespace anabranch;

extern "C" int anb_set_num_threads(int num_threads) {
  std::lock_guard<std::mutex> hold(*pool_mutex);
  wanted_threads = num_threads < 1 ? 1 : num_threads;
  if (process_pool != nullptr && process_pool->num_threads() != wanted_threads) {
    delete process_pool;
    process_pool = nullptr;
  }
  return wanted_threads;
}

extern "C" int anb_num_threads() { return PoolLease()->num_threads(); }

// {steps, inflated steps, steps on one thread, nanoseconds stalled} since the pool started.
extern "C" void anb_pool_stats(uint64_t* out) {
  PoolLease pool;
  const ThreadPool::Stats& stats = pool->stats();
  out[0] = stats.num_steps, out[1] = stats.num_inflated_steps, out[2] = stats.num_single_steps, out[3] = stats.stalled_ns;
}
