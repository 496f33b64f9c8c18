// Everything between two matrix products that works on one row, or one head of it: norms, quantization, rotation, gating.
#pragma once

#include "linear.h"

namespace anabranch {

// The sums of a matrix product as tasks keep them: panel p, row r at sums + (p * num_rows + r) * 32.
struct Sums {
  const float* sums;
  int num_panels, num_rows;
};

// What becomes of the heads that a task has projected.
struct HeadsCall {
  Sums from;                 // heads side by side, across panels
  int num_heads, head_dim;
  const float* norm;         // RMS norm of each head with these weights [head_dim], or null
  float eps;
  const float* const* angles;  // per row: [num_pairs] cosines, then sines; null: no rotation
  int num_pairs;
  float* out;                // row r at out + r * out_stride
  size_t out_stride;
};

// Each function's result depends on its arguments alone, bit for bit, row by row. Sums over a row have a fixed order.
struct ElementOps {
  // ceil(k / 32) groups of one activation row: scale = max|x| / 127 and codes = round(x / scale). A group with a NaN or an infinity gets
  // a NaN scale, so that it shows in every output of this row and in no other.
  void (*quantize_row)(const float* x, int k, ActivationGroup* out);
  // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]
  void (*norm_row)(const float* x, const float* weight, int k, float eps, float* out);
  // Norm each head, then rotate its x[i], x[i + num_pairs] by angle i.
  void (*finish_heads)(const HeadsCall& call);
  // silu(gate) * up of panel 0 and panel 1: 32 values of row r, quantized to out[r * out_stride], or as f32 at out + r * out_stride.
  void (*gate_quantize)(const Sums& from, ActivationGroup* out, int out_stride);
  void (*gate)(const Sums& from, float* out, size_t out_stride);
  // Add panel `panel`, n columns of it, to rows at `to`, `stride` floats apart.
  void (*add)(const Sums& from, int panel, int n, float* to, size_t stride);
  // Add bias[0..n) to every row of a panel's sums.
  void (*add_bias)(float* sums, int num_rows, const float* bias, int n);
};

const ElementOps& element_ops();

}  // namespace anabranch
