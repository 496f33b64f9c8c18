// Loops that do nothing but what they measure; compiled once per instruction set (limits_avx512.cpp, ...).
#pragma once

#include "intlib.h"
#include "limits.h"

namespace anabranch {
namespace ANB_ISA {

#if defined(__AVX512F__)
constexpr int kChains = 12;  // independent accumulators: more than latency times throughput
#else
constexpr int kChains = 5;   // of two registers each
#endif

static float multiply_floats(int64_t num_rounds, float seed) {
  vf sums[kChains];
  const vf x = set1(1.0f - seed), y = set1(seed);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = set1(float(i));
  for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], x, y);
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) sums[0] = add(sums[0], sums[i]);
  return hsum(sums[0]);
}

static float multiply_bytes(int64_t num_rounds, float seed) {
  vi sums[kChains];
  const vi u = i_set1(0x01010101 + int32_t(seed)), s = i_set1(0x01ff01ff);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = i_set1(i);
  for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = dot4(sums[i], u, s);
  }
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) sums[0] = i_add(sums[0], sums[i]);
  return float(i_hmax(sums[0]));
}

static float read(const uint8_t* data, int64_t num_bytes) {
  vi sums[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i] = i_zero();
  for (int64_t at = 0; at + 512 <= num_bytes; at += 512) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] = i_add(sums[i], i_load(data + at + i * 64));
  }
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) sums[0] = i_add(sums[0], sums[i]);
  return float(i_hmax(sums[0]));
}

extern const LimitOps limit_table;
const LimitOps limit_table{multiply_floats, multiply_bytes, read, kChains};

}  // namespace ANB_ISA
}  // namespace anabranch
