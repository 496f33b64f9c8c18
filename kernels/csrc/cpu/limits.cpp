#include "limits.h"

#include <algorithm>
#include <atomic>

#include "threads.h"

namespace anabranch {

namespace plain {
extern const LimitOps limit_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const LimitOps limit_table;
}
namespace avx512 {
extern const LimitOps limit_table;
}
#endif

namespace {

constexpr int kRuns = 8;

const LimitOps& limit_ops() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512::limit_table;
  if (isa() == Isa::avx2) return avx2::limit_table;
#endif
  return plain::limit_table;
}

std::atomic<float> sink{0.0f};

// The best rate of some runs of `body(thread)`, one task per thread, that do `work` in all.
template <class Body>
double best_rate(double work, Body body) {
  PoolLease pool;
  const int num_threads = pool->num_threads();
  double best = 0.0;
  for (int run = 0; run < kRuns; ++run) {
    const uint64_t start = monotonic_ns();
    pool->parallel_for(num_threads, [&](int task, int) { sink.store(body(task, num_threads), std::memory_order_relaxed); });
    best = std::max(best, work * num_threads / (double(monotonic_ns() - start) * 1e-9));
  }
  return best;
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

double anb_float_peak() {
  const LimitOps& ops = limit_ops();
  constexpr int64_t kRounds = 1'000'000;
  return best_rate(double(kRounds) * ops.num_chains * 16, [&](int task, int) { return ops.multiply_floats(kRounds, 1e-3f * float(task + 1)); });
}

double anb_byte_peak() {
  const LimitOps& ops = limit_ops();
  constexpr int64_t kRounds = 1'000'000;
  return best_rate(double(kRounds) * ops.num_chains * 64, [&](int task, int) { return ops.multiply_bytes(kRounds, float(task)); });
}

double anb_read_rate(const uint8_t* data, int64_t num_bytes) {
  const LimitOps& ops = limit_ops();
  const int num_threads = anb_num_threads();
  const int64_t part = num_bytes / num_threads / 512 * 512;
  const int num_passes = int(std::max<int64_t>(1, (64 << 20) / std::max<int64_t>(part, 1)));
  return best_rate(double(part) * num_passes, [&](int task, int) {
    float last = 0.0f;
    for (int pass = 0; pass < num_passes; ++pass) last = ops.read(data + task * part, part);
    return last;
  });
}
}
