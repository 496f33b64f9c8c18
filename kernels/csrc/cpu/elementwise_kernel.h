// elementwise.h for one instruction set; compiled once for each (elementwise_avx512.cpp, ...).
#pragma once

#include "elementwise_quantize.h"

namespace anabranch {
namespace ANB_ISA {

// Work on 16 values that may end early: missing ones are zeros.
ANB_INLINE vf load_some(const float* p, int n) {
  if (n >= kLanes) return load(p);
  float padded[kLanes] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}

ANB_INLINE void store_some(float* p, vf x, int n) {
  if (n >= kLanes) return store(p, x);
  float padded[kLanes];
  store(padded, x);
  for (int i = 0; i < n; ++i) p[i] = padded[i];
}

constexpr int kRowsAhead = 6;  // whole-block passes touch rows that lie far apart: their lines are fetched so many rows early

static void quantize_row(const float* x, int k, ActivationGroup* out) {
  const int whole = k / kGroup;
  quantize_groups(x, kGroup, whole, out, 1);
  x += whole * kGroup, out += whole, k -= whole * kGroup;
  if (k > 0) quantize_group(load_some(x, k), k > kLanes ? load_some(x + kLanes, k - kLanes) : zero(), out);
}

static void norm_row(const float* x, const float* weight, int k, float eps, float* out) {
  vf sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= k; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * kLanes);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (int j = 0; i < k; i += kLanes, ++j) {
    const vf v = load_some(x + i, k - i);
    sums[j] = fma(v, v, sums[j]);
  }
  const float mean = hsum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / float(k);
  const vf inverse = set1(1.0f / sqrtf(mean + eps));
  for (i = 0; i + kLanes <= k; i += kLanes) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
  if (i < k) store_some(out + i, mul(mul(load_some(x + i, k - i), inverse), load_some(weight + i, k - i)), k - i);
}

static void rotate(float* x, const float* angles, int num_pairs) {
  const float *cos = angles, *sin = angles + num_pairs;
  for (int i = 0; i < num_pairs; i += kLanes) {
    const int n = num_pairs - i;
    const vf a = load_some(x + i, n), b = load_some(x + i + num_pairs, n), c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(x + i, sub(mul(a, c), mul(b, s)), n);
    store_some(x + i + num_pairs, add(mul(b, c), mul(a, s)), n);
  }
}

static void finish_heads(const HeadsCall& call) {
  constexpr int kMaxColumns = 32 * kPanelColumns;
  alignas(64) float columns[kMaxColumns];
  const int width = call.num_heads * call.head_dim;
  for (int r = 0; r < call.from.num_rows; ++r) {
    for (int p = 0; p < call.from.num_panels; ++p) {
      const float* sums = call.from.sums + (size_t(p) * call.from.num_rows + r) * kPanelColumns;
      store(columns + p * kPanelColumns, load(sums));
      store(columns + p * kPanelColumns + kLanes, load(sums + kLanes));
    }
    for (int h = 0; h < call.num_heads; ++h) {
      float* x = columns + h * call.head_dim;
      if (call.norm != nullptr) norm_row(x, call.norm, call.head_dim, call.eps, x);
      if (call.angles != nullptr) rotate(x, call.angles[r], call.num_pairs);
    }
    float* out = call.out + r * call.out_stride;
    for (int i = 0; i < width; i += kLanes) __builtin_prefetch(out + kRowsAhead * call.out_stride + i, 1, 3);
    for (int i = 0; i < width; i += kLanes) store_some(out + i, load(columns + i), width - i);
  }
}

// 1 / d for d in [1, 2^120], to an ulp or two: an estimate, and Newton steps, each of which squares the error. Several times faster than a
// division, which matters: silu runs once per token, layer and inner unit.
ANB_INLINE vf reciprocal(vf d) {
#if defined(__AVX512F__)
  vf y = {_mm512_rcp14_ps(d.v)};
  constexpr int kSteps = 1;
#else
  vf y = float_of_bits(i_sub(i_set1(0x7ef311c3), bits_of(d)));  // within 12 %
  constexpr int kSteps = 3;
#endif
  for (int i = 0; i < kSteps; ++i) y = fma(y, sub(set1(1.0f), mul(d, y)), y);
  return y;
}

// x / (1 + e^-x). The exponent is clamped where e^-x would overflow; the quotient is a tiny number there, and NaN stays NaN.
ANB_INLINE vf silu(vf x) { return mul(x, reciprocal(add(set1(1.0f), exp2(min(set1(118.0f), mul(x, set1(-kLog2e))))))); }

ANB_INLINE void gate_row(const Sums& from, int row, float* out) {
  const float* gate = from.sums + size_t(row) * kPanelColumns;
  const float* up = gate + size_t(from.num_rows) * kPanelColumns;
  store(out, mul(silu(load(gate)), load(up)));
  store(out + kLanes, mul(silu(load(gate + kLanes)), load(up + kLanes)));
}

// Two passes over a few rows at a time: either has a long chain of dependent operations, and only half of it lets enough rows overlap.
static void gate_quantize(const Sums& from, ActivationGroup* out, int out_stride) {
  constexpr int kRows = 8;
  alignas(64) float values[kRows][kPanelColumns];
  for (int first = 0; first < from.num_rows; first += kRows) {
    const int n = from.num_rows - first < kRows ? from.num_rows - first : kRows;
    for (int r = 0; r < n; ++r) {
      __builtin_prefetch(out + (first + r) * out_stride, 1, 3);
      gate_row(from, first + r, values[r]);
    }
    quantize_groups(values[0], kPanelColumns, n, out + first * out_stride, size_t(out_stride));
  }
}

static void gate(const Sums& from, float* out, size_t out_stride) {
  for (int r = 0; r < from.num_rows; ++r) gate_row(from, r, out + r * out_stride);
}

static void add_panel(const Sums& from, int panel, int n, float* to, size_t stride) {
  const float* sums = from.sums + size_t(panel) * from.num_rows * kPanelColumns;
  for (int r = 0; r < from.num_rows; ++r, sums += kPanelColumns, to += stride) {
    for (int i = 0; i < n; i += kLanes) __builtin_prefetch(to + kRowsAhead * stride + i, 1, 3);
    for (int i = 0; i < n; i += kLanes) store_some(to + i, add(load_some(to + i, n - i), load(sums + i)), n - i);
  }
}

static void add_bias(float* sums, int num_rows, const float* bias, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const vf b = load_some(bias + i, n - i);
    for (int r = 0; r < num_rows; ++r) store(sums + size_t(r) * kPanelColumns + i, add(load(sums + size_t(r) * kPanelColumns + i), b));
  }
}

extern const ElementOps element_table;
const ElementOps element_table{quantize_row, norm_row, finish_heads, gate_quantize, gate, add_panel, add_bias};

}  // namespace ANB_ISA
}  // namespace anabranch
