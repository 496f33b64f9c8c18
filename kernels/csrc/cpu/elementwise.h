// Everything between two matrix products that works on one row, or one head of it: norms, quantization, rotation, gating.
#pragma once

#include "linear.h"

namespace anabranch {

// Each function's result depends on its arguments alone, bit for bit. Sums over a row have a fixed order.
struct ElementOps {
  // One activation row to a QuantizedLayout record: per 32 values, scale = max|x| / 127 and codes = round(x / scale). A group with a
  // NaN or an infinity gets a NaN scale, so that it shows in every output of this row and in no other.
  void (*quantize_row)(const float* x, int k, const QuantizedLayout& layout, uint8_t* out);
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]
  void (*norm_row)(const float* x, const float* weight, int k, float eps, float* out);
  // Rotate x[i], x[i + num_pairs] by the angle whose cosine is cos[i], for i < num_pairs.
  void (*rotate)(float* x, const float* cos, const float* sin, int num_pairs);
  // 32 values of silu(gate) * up, as they are or as group `group` of a record.
  void (*gate)(const float* gate, const float* up, float* out);
  void (*gate_quantize)(const float* gate, const float* up, const QuantizedLayout& layout, int group, uint8_t* out);
  // to[i] += from[i]; n is at most 32.
  void (*add)(float* to, const float* from, int n);
};

const ElementOps& element_ops();

}  // namespace anabranch
