#include "linear.h"

#include <atomic>

namespace anabranch {

namespace plain {
extern const LinearOps linear_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const LinearOps linear_table;
}
namespace avx512 {
extern const LinearOps linear_table;
}
#endif

namespace {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
  return Isa::plain;
}

std::atomic<int> isa_in_use{-1};

}  // namespace

Isa isa() {
  int seen = isa_in_use.load(std::memory_order_relaxed);
  if (seen < 0) {
    seen = int(best_isa());
    isa_in_use.store(seen, std::memory_order_relaxed);
  }
  return Isa(seen);
}

const LinearOps& linear_ops() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512::linear_table;
  if (isa() == Isa::avx2) return avx2::linear_table;
#endif
  return plain::linear_table;
}

}  // namespace anabranch

using namespace anabranch;

extern "C" int anb_isa() { return int(isa()); }

extern "C" int anb_set_isa(int highest) {
  const int best = int(best_isa());
  isa_in_use.store(highest < 0 ? 0 : highest < best ? highest : best);
  return anb_isa();
}
