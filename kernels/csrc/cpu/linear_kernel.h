// The matrix product of linear.h for one instruction set; compiled once for each (linear_avx512.cpp, ...).
//
// A group of a panel's codes is unpacked into registers once, and all rows pass by it, a tile of them at a time: their sums wait in `out`
// between groups, in the first-level cache (f32 keeps its bits there). So unpacking costs the same for one row and for many, and a product
// runs at 90 % of what its instructions allow: 8 dot products and 2 or 3 float operations per 16 columns, row and group.
#pragma once

#include "intlib.h"
#include "linear.h"

#define ANB_MEMBER inline __attribute__((always_inline))

namespace anabranch {
namespace ANB_ISA {

constexpr int kWords = kGroup / 4;   // a group's codes of a column, by the 4 bytes that a dot product takes
constexpr int kStripRows = 128;      // rows that pass by a panel together: their sums and their next records fit the first-level cache
#if defined(__AVX512F__)
constexpr int kTileRows = 4;  // 4 rows x 2 vectors: 8 accumulators beside 16 registers of codes and 6 of scales and mins
constexpr int kVectors = 2;   // vectors of 16 columns that a tile spans
constexpr int kExactRows = 6;
#else
constexpr int kTileRows = 2;
constexpr int kVectors = 1;
constexpr int kExactRows = 2;
#endif
constexpr int kPrefetchBytes = 2560;

ANB_INLINE vi broadcast_codes(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return i_set1(four);
}

enum class Arithmetic { symmetric, affine, halves };

constexpr Arithmetic arithmetic_of(PanelKind kind) {
  return kind == PanelKind::halves8 ? Arithmetic::halves : is_affine(kind) ? Arithmetic::affine : Arithmetic::symmetric;
}

// scale * (what the accumulator `sum` gained since it was kBiasBits): see kBias.
ANB_INLINE vf scaled(vi sum, vf scale, vf negative_bias) {
  if (kHasFma) return fma(float_of_bits(sum), scale, negative_bias);
  return mul(to_float(i_sub(sum, i_set1(kBiasBits))), scale);
}

// The chain of float operations of one group: the only place where it is written. negative_bias is -kBias * scale.
template <Arithmetic A>
ANB_INLINE vf add_group(vf acc, vi sum, vf scale, vf negative_bias, vf min, const ActivationGroup& a) {
  acc = fma(scaled(sum, scale, negative_bias), set1(a.scale), acc);
  if (A == Arithmetic::affine) acc = fma(min, set1(a.weighted_sum), acc);
  return acc;
}

template <PanelKind K>
ANB_INLINE vf load_scale(const uint8_t* p, int column) {
  return is_wide(K) ? load(reinterpret_cast<const float*>(p) + column) : load_half(reinterpret_cast<const uint16_t*>(p) + column);
}

// 64 bytes of 4-bit codes to the unsigned bytes that arithmetic uses (symmetric: value + 128).
template <PanelKind K>
ANB_INLINE void unpack(vi packed, vi* low, vi* high) {
  *low = i_and(packed, i_set1(0x0f0f0f0f));
  *high = high_nibbles(packed);
  if (K == PanelKind::sym4) {
    *low = i_add_bytes(*low, i_set1(0x78787878));
    *high = i_add_bytes(*high, i_set1(0x78787878));
  }
}

// A panel as it lies in memory, read group after group.
template <PanelKind K>
struct Stream {
  static constexpr Arithmetic A = arithmetic_of(K);
  static constexpr int kAheadGroups = ceil_div(kPrefetchBytes, group_bytes(K));
  const uint8_t* group;
  const uint8_t* end;   // of the panel
  const uint8_t* next;  // read after it

  Stream(const Panel& panel, int num_groups, const uint8_t* next_panel)
      : group(panel.data), end(panel.data + size_t(num_groups) * group_bytes(K)), next(next_panel) {}

  ANB_MEMBER void advance() { group += group_bytes(K); }
  // Runs a little ahead, past the end of the panel into the next one.
  ANB_MEMBER void fetch_ahead() const {
    const uint8_t* p = group + kAheadGroups * group_bytes(K);
    if (p >= end) p = next + (p - end);
    for (int line = 0; line < group_bytes(K); line += 64) __builtin_prefetch(p + line, 0, 3);
  }
  // The codes of k + 0..3 and k + 4..7 (k a multiple of 8) for 16 columns.
  ANB_MEMBER void codes(int k, int column, vi* low, vi* high) const {
    if constexpr (is_4bit(K)) {
      unpack<K>(i_load(group + k * kPanelColumns / 2 + column * 4), low, high);
    } else {
      *low = i_load(group + k * kPanelColumns + column * 4);
      *high = i_load(group + (k + 4) * kPanelColumns + column * 4);
    }
  }
  ANB_MEMBER vf scale(int column) const { return load_scale<K>(group + code_bytes(K), column); }
  ANB_MEMBER vf min(int column) const { return load_scale<K>(group + code_bytes(K) + scale_bytes(K), column); }
  ANB_MEMBER vf half_scale(int column) const { return load_scale<K>(group + code_bytes(K) + 4 * kPanelColumns, column); }
};

// One group of a panel in registers: codes of 4 k each, and what turns sums of them into floats.
template <PanelKind K>
struct Group {
  static constexpr Arithmetic A = arithmetic_of(K);
  static constexpr int kParts = A == Arithmetic::halves ? 2 : 1;  // runs of k with a scale of their own
  vi codes[kWords][kVectors];
  vf scale[kParts][kVectors], negative_bias[kParts][kVectors], min[kVectors];

  ANB_MEMBER Group(const Stream<K>& stream, int column) {
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; ++c) {
#pragma GCC unroll 4
      for (int i = 0; i < kWords; i += 2) stream.codes(4 * i, column + c * kLanes, &codes[i][c], &codes[i + 1][c]);
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        scale[part][c] = part == 0 ? stream.scale(column + c * kLanes) : stream.half_scale(column + c * kLanes);
        negative_bias[part][c] = mul(scale[part][c], set1(-kBias));
      }
      min[c] = A == Arithmetic::affine ? stream.min(column + c * kLanes) : zero();
    }
  }
};

// R rows of one group of activations, stride groups apart, times the group `w`: added to the sums at `out`.
template <int R, PanelKind K>
ANB_INLINE void add_rows(const Group<K>& w, const ActivationGroup* a, ptrdiff_t stride, float* out) {
  constexpr Arithmetic A = Group<K>::A;
  constexpr int kParts = Group<K>::kParts;
#pragma GCC unroll 2
  for (int part = 0; part < kParts; ++part) {
    vi dot[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const ActivationGroup& row = a[r * stride];
      const int32_t start = A == Arithmetic::affine ? kBiasBits : kParts == 1 ? row.offset : row.half_offset[part];
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) dot[r][c] = i_set1(start);
    }
#pragma GCC unroll 8
    for (int i = part * kWords / kParts; i < (part + 1) * kWords / kParts; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vi s = broadcast_codes(a[r * stride].codes + 4 * i);
#pragma GCC unroll 2
        for (int c = 0; c < kVectors; ++c) dot[r][c] = dot4(dot[r][c], w.codes[i][c], s);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kVectors; ++c) {
        float* to = out + r * kPanelColumns + c * kLanes;
        store(to, add_group<A>(load(to), dot[r][c], w.scale[part][c], w.negative_bias[part][c], w.min[c], a[r * stride]));
      }
    }
  }
}

// out[row][column..] = all groups of a panel times rows, at most kStripRows of them.
template <PanelKind K>
static void strip(Stream<K> stream, const ActivationGroup* rows, ptrdiff_t stride, int num_rows, int num_groups, int column, float* out) {
  for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; ++c) store(out + r * kPanelColumns + c * kLanes, zero());
  }
  for (int g = 0; g < num_groups; ++g, stream.advance(), ++rows) {
    stream.fetch_ahead();
    const Group<K> w(stream, column);
    const ActivationGroup* a = rows;
    float* to = out;
    int left = num_rows;
    for (; left >= kTileRows; left -= kTileRows, a += kTileRows * stride, to += kTileRows * kPanelColumns) {
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) __builtin_prefetch(a + r * stride + 1, 0, 3);
      add_rows<kTileRows>(w, a, stride, to);
    }
    if (left == 1) add_rows<1>(w, a, stride, to);
    if constexpr (kTileRows > 2) {
      if (left == 2) add_rows<2>(w, a, stride, to);
      if (left == 3) add_rows<3>(w, a, stride, to);
    }
  }
}

template <PanelKind K>
static void matmul_kind(const Panel& panel, const ActivationRows& rows, int num_rows, float* out, const uint8_t* next) {
  for (int first = 0; first < num_rows; first += kStripRows) {
    const int n = num_rows - first < kStripRows ? num_rows - first : kStripRows;
    const Stream<K> stream(panel, rows.num_groups, first + n < num_rows ? panel.data : next);
    const ActivationGroup* a = rows.first + size_t(first) * rows.stride;
#pragma GCC unroll 2
    for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      strip<K>(stream, a, rows.stride, n, rows.num_groups, column, out + size_t(first) * kPanelColumns + column);
    }
  }
}

static void matmul(const Panel& panel, const ActivationRows& rows, int num_rows, float* out, const uint8_t* next) {
  switch (panel.kind) {
    case PanelKind::sym4: return matmul_kind<PanelKind::sym4>(panel, rows, num_rows, out, next);
    case PanelKind::affine4: return matmul_kind<PanelKind::affine4>(panel, rows, num_rows, out, next);
    case PanelKind::affine4_wide: return matmul_kind<PanelKind::affine4_wide>(panel, rows, num_rows, out, next);
    case PanelKind::sym8: return matmul_kind<PanelKind::sym8>(panel, rows, num_rows, out, next);
    case PanelKind::sym8_wide: return matmul_kind<PanelKind::sym8_wide>(panel, rows, num_rows, out, next);
    case PanelKind::affine8: return matmul_kind<PanelKind::affine8>(panel, rows, num_rows, out, next);
    case PanelKind::affine8_wide: return matmul_kind<PanelKind::affine8_wide>(panel, rows, num_rows, out, next);
    case PanelKind::halves8: return matmul_kind<PanelKind::halves8>(panel, rows, num_rows, out, next);
    case PanelKind::f32: return;  // takes f32 activations: matmul_exact
  }
}

template <int R>
static void exact_tile(const float* w, int k, const float* x, size_t stride, float* out) {
#if defined(__AVX512F__)
  constexpr int C = 2;
#else
  constexpr int C = 1;
#endif
#pragma GCC unroll 2
  for (int column = 0; column < kPanelColumns; column += C * kLanes) {
    vf acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[r][c] = zero();
    }
    for (int i = 0; i < k; ++i) {
      vf b[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) b[c] = load(w + size_t(i) * kPanelColumns + column + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf a = set1(x[r * stride + i]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) store(out + r * kPanelColumns + column + c * kLanes, acc[r][c]);
    }
  }
}

static void matmul_exact(const Panel& panel, int k, const float* x, size_t stride, int num_rows, float* out) {
  const auto* w = reinterpret_cast<const float*>(panel.data);
  constexpr int R = kExactRows;
  for (; num_rows >= R; num_rows -= R, x += R * stride, out += R * kPanelColumns) exact_tile<R>(w, k, x, stride, out);
  for (; num_rows > 0; --num_rows, x += stride, out += kPanelColumns) exact_tile<1>(w, k, x, stride, out);
}

extern const LinearOps linear_table;
const LinearOps linear_table{matmul, matmul_exact};

}  // namespace ANB_ISA
}  // namespace anabranch
