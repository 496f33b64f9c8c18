// Matrix products with quantized weights: one family, "grouped affine", for every file format.
//
// Along k, every group of 32 weights of a column has unsigned codes and one scale (and one min): w = scale * code + min, or, for the
// symmetric kinds, w = scale * (code - 128). Activations are signed bytes with one f32 scale per row and group of 32. Within a group
// the dot product of codes is an exact int32; groups are added in ascending order:
//
//   symmetric:  acc = fma(scale_w * float(dot - 128 * sum_a), scale_a, acc)
//   affine:     acc = fma(scale_w * float(dot), scale_a, acc);  acc = fma(min_w, scale_a * sum_a, acc)
//
// Each output is this one chain of operations whatever the number of rows, threads, tiles or cache blocks: the product is batch
// invariant bit for bit, and AVX2 equals AVX-512. Panels of f32 weights take f32 activations: acc = fma(a, w, acc) over ascending k.
#pragma once

#include "common.h"

namespace anabranch {

constexpr int kPanelColumns = 32;
constexpr int kGroup = 32;

// What a panel's bytes are. A panel holds 32 columns (rows of the matrix as files see it) for all of k, group after group:
//   codes   8 bits: [8][32 columns][4 k], the k of a vpdpbusd lane side by side
//           4 bits: [4][32 columns][4 k], low nibbles hold k + 0..3 and high nibbles k + 4..7 of each run of 8
//   scales  [32 columns] f16, or f32 where "wide"; `halves` has [2][32], one per 16 k
//   mins    [32 columns] of the same type (affine only)
// 4-bit symmetric codes are stored as value + 8, 8-bit ones as value + 128. f32 panels are [k][32 columns]. Columns and k that the
// matrix does not have are zeros (in value).
enum class PanelKind : int16_t {
  sym4 = 0, affine4 = 1, affine4_wide = 2, sym8 = 3, sym8_wide = 4, affine8 = 5, affine8_wide = 6, halves8 = 7, f32 = 8,
};
constexpr int kNumPanelKinds = 9;

constexpr bool is_4bit(PanelKind kind) { return kind <= PanelKind::affine4_wide; }
constexpr bool is_affine(PanelKind kind) {
  return kind == PanelKind::affine4 || kind == PanelKind::affine4_wide || kind == PanelKind::affine8 || kind == PanelKind::affine8_wide;
}
constexpr bool is_wide(PanelKind kind) {
  return kind == PanelKind::affine4_wide || kind == PanelKind::sym8_wide || kind == PanelKind::affine8_wide || kind == PanelKind::halves8;
}

constexpr int code_bytes(PanelKind kind) { return is_4bit(kind) ? kGroup * kPanelColumns / 2 : kGroup * kPanelColumns; }
constexpr int scale_bytes(PanelKind kind) { return kPanelColumns * (is_wide(kind) ? 4 : 2) * (kind == PanelKind::halves8 ? 2 : 1); }

// Bytes of one group of 32 k.
constexpr int group_bytes(PanelKind kind) {
  return kind == PanelKind::f32 ? kGroup * kPanelColumns * 4 : code_bytes(kind) + scale_bytes(kind) * (is_affine(kind) ? 2 : 1);
}

struct Panel {
  const uint8_t* data;
  int32_t first_column;  // of the output
  int16_t num_columns;   // used ones, at most 32
  PanelKind kind;
};

// A weight matrix [num_columns of the output, k]. Panels follow one another in the order in which they are streamed.
struct Matrix {
  const Panel* panels;
  const float* bias;  // [num_columns], or null
  int32_t num_panels;
  int32_t num_columns;
  int32_t k;
  int32_t is_exact;      // f32 panels; otherwise all are quantized
  int32_t num_groups() const { return ceil_div(k, kGroup); }
};

// A matrix as it lies in its file, for reading single rows.
struct Table {
  const uint8_t* rows;
  int64_t row_bytes;
  int32_t num_rows;
  int32_t k;
  int32_t format;  // index into kFormats of kernels/quantize.py
  int32_t reserved;
};

// out[0..k) = row `row` of the table, by the format's definition.
void read_row(const Table& table, int row, float* out);

// Integer accumulators start at the bits of 1.5 * 2^23, so that reading them as a float gives kBias + dot (|dot| < 2^22). The product
// scale * dot then is fma(kBias + dot, scale, -kBias * scale), whose one rounding is the same as that of float(dot) * scale: a conversion
// and a multiplication in one instruction. It needs kBias * scale to be exact: scales have at most kScaleBits significant bits.
constexpr float kBias = 12582912.0f;
constexpr int32_t kBiasBits = 0x4b400000;
constexpr int kScaleBits = 21;

// 32 quantized activations of a row, with everything that products need to know about them: one cache line, written and read as a whole.
struct alignas(64) ActivationGroup {
  int8_t codes[kGroup];
  float scale;             // value = scale * code
  float weighted_sum;      // scale * sum of codes
  int32_t offset;          // kBiasBits - 128 * sum of codes: where the accumulators of symmetric panels start
  int32_t half_offset[2];  // the same for either half
  int32_t unused[3];
};
static_assert(sizeof(ActivationGroup) == 64);

// Groups from one row to the next: not a multiple of 16, or the rows of a tile would share cache sets.
constexpr int row_stride(int num_groups) { return num_groups + (num_groups % 16 == 0); }

// Quantized activation rows, row r at first + r * stride.
struct ActivationRows {
  const ActivationGroup* first;
  int num_groups, stride;
};

// The functions that each instruction set implements.
struct LinearOps {
  // out[row][0..32) = sum over k of activations[row] and the panel. `next` is what this thread will probably read next: its beginning is
  // prefetched, and any address will do.
  void (*matmul)(const Panel& panel, const ActivationRows& rows, int num_rows, float* out, const uint8_t* next);
  // The same for f32 panels: row r at x + r * stride, k values.
  void (*matmul_exact)(const Panel& panel, int k, const float* x, size_t stride, int num_rows, float* out);
};

const LinearOps& linear_ops();

}  // namespace anabranch
