// One operand of a matrix product, and the product of one panel with it: what the executor and the C interface share.
#pragma once

#include <algorithm>

#include "elementwise.h"

namespace anabranch {

constexpr int kRowBlock = 480;                 // rows of one task at most,
constexpr size_t kRowBlockBytes = 768 * 1024;  // so that their operands stay in the second-level cache while panels come and go
constexpr int kRowStep = 4;                    // blocks are whole tiles of the widest variant

// A task's rows as a matrix product takes them: quantized records, or f32.
struct Operand {
  const uint8_t* rows;
  size_t row_bytes;
};

// Where a task's sums of `matmul` go: [panel][row][32].
struct Tile {
  float* sums;
  int num_rows;
  float* panel(int p) const { return sums + size_t(p) * num_rows * kPanelColumns; }
  Sums all(int first_panel, int num_panels) const { return {panel(first_panel), num_panels, num_rows}; }
};

inline size_t operand_bytes(const Matrix& matrix) {
  return matrix.is_exact ? round_up(size_t(matrix.k) * 4, 64) : row_stride(matrix.num_groups()) * sizeof(ActivationGroup);
}

// Rows of a block: all blocks are about equal.
inline int row_block(int num_rows, const Matrix& matrix) {
  const int limit = std::max(kRowStep, std::min(kRowBlock, int(kRowBlockBytes / operand_bytes(matrix))));
  return int(round_up(ceil_div(num_rows, ceil_div(std::max(num_rows, 1), limit)), kRowStep));
}

inline void add_bias(const Matrix& matrix, const Panel& panel, float* sums, int num_rows) {
  if (matrix.bias != nullptr) element_ops().add_bias(sums, num_rows, matrix.bias + panel.first_column, panel.num_columns);
}

inline void multiply(const Matrix& matrix, int panel, const Operand& x, const Tile& tile, int at, const uint8_t* next) {
  const Panel& p = matrix.panels[panel];
  if (matrix.is_exact) {
    linear_ops().matmul_exact(p, matrix.k, reinterpret_cast<const float*>(x.rows), x.row_bytes / 4, tile.num_rows, tile.panel(at));
  } else {
    const ActivationRows groups{reinterpret_cast<const ActivationGroup*>(x.rows), matrix.num_groups(), int(x.row_bytes / sizeof(ActivationGroup))};
    linear_ops().matmul(p, groups, tile.num_rows, tile.panel(at), next);
  }
  add_bias(matrix, p, tile.panel(at), tile.num_rows);
}

// One activation row in the form that `matrix` takes.
inline void prepare_row(const Matrix& matrix, const float* x, const float* norm, float eps, float* normed, uint8_t* out) {
  const int k = matrix.k;
  if (matrix.is_exact) {
    auto* to = reinterpret_cast<float*>(out);
    if (norm != nullptr) {
      element_ops().norm_row(x, norm, k, eps, to);
    } else {
      std::memcpy(to, x, size_t(k) * 4);
    }
    return;
  }
  if (norm != nullptr) element_ops().norm_row(x, norm, k, eps, normed);
  element_ops().quantize_row(norm != nullptr ? normed : x, k, reinterpret_cast<ActivationGroup*>(out));
}

}  // namespace anabranch
