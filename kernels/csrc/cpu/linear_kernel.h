// The matrix product of linear.h for one instruction set; compiled once for each (linear_avx512.cpp, ...).
//
// Few rows stream 4-bit codes straight from memory. More rows first unpack a block of k of the panel into cache, once, and run tiles
// of rows over it. Both do the same arithmetic (see linear.h). Partial sums wait in `out` between blocks of k: f32 keeps its bits there.
#pragma once

#include "intlib.h"
#include "linear.h"

#define ANB_MEMBER inline __attribute__((always_inline))

namespace anabranch {
namespace ANB_ISA {

constexpr int kBlockGroups = 12;  // groups of one unpacked block: 12 KB of codes and 3 KB of scales leave room for rows in a 48 KB cache
#if defined(__AVX512F__)
constexpr int kTileRows = 6;  // 6 rows x 2 vectors: 12 integer and 12 float accumulators of 32 registers
constexpr int kVectors = 2;   // vectors of 16 columns that a tile spans
#else
constexpr int kTileRows = 2;
constexpr int kVectors = 1;
#endif
constexpr int kDirectTiles = 3;  // up to so many tiles of rows, unpacking in registers costs less than a pass through the cache
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

// What to fetch while a tile runs: `lines` cache lines per group, from `from` on.
struct Ahead {
  const uint8_t* from;
  int lines;

  ANB_MEMBER void fetch(int group) const {
    const uint8_t* p = from + size_t(group) * lines * 64;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(p + i * 64, 0, 2);  // into the second level: the first is for this panel
  }
};

// A panel as it lies in memory, read group after group.
template <PanelKind K>
struct Stream {
  static constexpr Arithmetic A = arithmetic_of(K);
  static constexpr int kAheadGroups = ceil_div(kPrefetchBytes, group_bytes(K));
  const uint8_t* group;
  const uint8_t* end;   // of the panel
  const uint8_t* next;  // read after it

  Stream(const Panel& panel, const uint8_t* next_panel, int first_group, int num_groups)
      : group(panel.data + size_t(first_group) * group_bytes(K)), end(panel.data + size_t(num_groups) * group_bytes(K)), next(next_panel) {}

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

// A block of k made ready by `prepare`: bytes of codes, f32 scales and mins.
template <Arithmetic Arith>
struct Block {
  static constexpr Arithmetic A = Arith;
  const uint8_t* group;  // [8][32 columns][4]
  size_t group_step;
  const float* scales;   // per group [2][32 columns]: scales and mins, or the two scales of `halves`

  ANB_MEMBER void advance() { group += group_step, scales += 2 * kPanelColumns; }
  ANB_MEMBER void fetch_ahead() const {}
  ANB_MEMBER void codes(int k, int column, vi* low, vi* high) const {
    *low = i_load(group + k * kPanelColumns + column * 4);
    *high = i_load(group + (k + 4) * kPanelColumns + column * 4);
  }
  ANB_MEMBER vf scale(int column) const { return load(scales + column); }
  ANB_MEMBER vf min(int column) const { return load(scales + kPanelColumns + column); }
  ANB_MEMBER vf half_scale(int column) const { return load(scales + kPanelColumns + column); }
};

// R rows x C vectors of columns over `num_groups` groups. Everything is unrolled into registers: R * C accumulators of either type.
template <int R, int C, class Source>
static void tile(Source source, const ActivationGroup* rows, int stride, int num_groups, int column, float* out, bool is_first, Ahead ahead) {
  constexpr Arithmetic A = Source::A;
  constexpr int kParts = A == Arithmetic::halves ? 2 : 1;  // runs of k with a scale of their own
  vf acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[r][c] = is_first ? zero() : load(out + r * kPanelColumns + column + c * kLanes);
  }
  for (int g = 0; g < num_groups; ++g, source.advance()) {
    const ActivationGroup* a = rows + g;
    if (ahead.lines == 0) {
      source.fetch_ahead();
    } else {
      ahead.fetch(g);
    }
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      vi dot[R][C];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const ActivationGroup& row = a[size_t(r) * stride];
        const int32_t start = A == Arithmetic::affine ? kBiasBits : kParts == 1 ? row.offset : row.half_offset[part];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) dot[r][c] = i_set1(start);
      }
#pragma GCC unroll 4
      for (int k = part * kGroup / kParts; k < (part + 1) * kGroup / kParts; k += 8) {
        vi low[C], high[C];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) source.codes(k, column + c * kLanes, &low[c], &high[c]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int8_t* row = a[size_t(r) * stride].codes;
          const vi s = broadcast_codes(row + k), t = broadcast_codes(row + k + 4);
#pragma GCC unroll 2
          for (int c = 0; c < C; ++c) dot[r][c] = dot4(dot4(dot[r][c], low[c], s), high[c], t);
        }
      }
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const vf scale = part == 0 ? source.scale(column + c * kLanes) : source.half_scale(column + c * kLanes);
        const vf negative_bias = mul(scale, set1(-kBias));
        const vf min = A == Arithmetic::affine ? source.min(column + c * kLanes) : zero();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c] = add_group<A>(acc[r][c], dot[r][c], scale, negative_bias, min, a[size_t(r) * stride]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) store(out + r * kPanelColumns + column + c * kLanes, acc[r][c]);
  }
}

template <int R, class Source>
static void tile_panel(const Source& source, const ActivationGroup* rows, int stride, int num_groups, float* out, bool is_first, Ahead ahead) {
#pragma GCC unroll 2
  for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    tile<R, kVectors>(source, rows, stride, num_groups, column, out, is_first, ahead);
  }
}

// All rows, in tiles as equal as possible. Several tiles share the fetching of what comes next, `next`; one tile fetches for itself.
template <class Source>
static void tile_rows(const Source& source, const ActivationGroup* rows, int stride, int num_rows, int num_groups, float* out, bool is_first,
                      const uint8_t* next, int bytes_per_group) {
  const int num_tiles = ceil_div(num_rows, kTileRows);
  for (int i = 0; i < num_tiles; ++i) {
    const int n = ceil_div(num_rows, num_tiles - i);
    const Ahead ahead{next + size_t(i) * num_groups * bytes_per_group / num_tiles, num_tiles == 1 ? 0 : ceil_div(bytes_per_group, 64 * num_tiles)};
    switch (n) {
      case 1: tile_panel<1>(source, rows, stride, num_groups, out, is_first, ahead); break;
      case 2: tile_panel<2>(source, rows, stride, num_groups, out, is_first, ahead); break;
#if defined(__AVX512F__)
      case 3: tile_panel<3>(source, rows, stride, num_groups, out, is_first, ahead); break;
      case 4: tile_panel<4>(source, rows, stride, num_groups, out, is_first, ahead); break;
      case 5: tile_panel<5>(source, rows, stride, num_groups, out, is_first, ahead); break;
      case 6: tile_panel<6>(source, rows, stride, num_groups, out, is_first, ahead); break;
#endif
    }
    num_rows -= n;
    rows += n * stride;
    out += n * kPanelColumns;
  }
}

// Codes of 8 bits stay where they are; the rest goes to scratch.
template <PanelKind K>
static Block<arithmetic_of(K)> prepare(Stream<K> source, int num_groups, uint8_t* scratch) {
  auto* scales = reinterpret_cast<float*>(scratch + size_t(kBlockGroups) * kGroup * kPanelColumns);
  const Block<arithmetic_of(K)> block{is_4bit(K) ? scratch : source.group,
                                      is_4bit(K) ? size_t(kGroup * kPanelColumns) : size_t(group_bytes(K)), scales};
  for (int g = 0; g < num_groups; ++g, source.advance(), scales += 2 * kPanelColumns) {
    source.fetch_ahead();
#pragma GCC unroll 2
    for (int column = 0; column < kPanelColumns; column += kLanes) {
      if (is_4bit(K)) {
        uint8_t* codes = scratch + size_t(g) * kGroup * kPanelColumns + column * 4;
#pragma GCC unroll 4
        for (int k = 0; k < kGroup; k += 8) {
          vi low, high;
          source.codes(k, column, &low, &high);
          i_store(codes + k * kPanelColumns, low);
          i_store(codes + (k + 4) * kPanelColumns, high);
        }
      }
      store(scales + column, source.scale(column));
      if (is_affine(K)) store(scales + kPanelColumns + column, source.min(column));
      if (K == PanelKind::halves8) store(scales + kPanelColumns + column, source.half_scale(column));
    }
  }
  return block;
}

template <PanelKind K>
static void matmul_kind(const Panel& panel, const ActivationRows& rows, int num_rows, float* out, void* scratch, const uint8_t* next) {
  const int all = rows.num_groups;
  if (num_rows <= kDirectTiles * kTileRows) {
    return tile_rows(Stream<K>(panel, next, 0, all), rows.first, rows.stride, num_rows, all, out, true, next, group_bytes(K));
  }
  const int num_blocks = ceil_div(all, kBlockGroups), block_groups = ceil_div(all, num_blocks);
  for (int group = 0; group < all; group += block_groups) {
    const int num_groups = all - group < block_groups ? all - group : block_groups;
    const auto block = prepare<K>(Stream<K>(panel, next, group, all), num_groups, static_cast<uint8_t*>(scratch));
    tile_rows(block, rows.first + group, rows.stride, num_rows, num_groups, out, group == 0, next + size_t(group) * group_bytes(K),
              group_bytes(K));
  }
}

static void matmul(const Panel& panel, const ActivationRows& rows, int num_rows, float* out, void* scratch, const uint8_t* next) {
  switch (panel.kind) {
    case PanelKind::sym4: return matmul_kind<PanelKind::sym4>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::affine4: return matmul_kind<PanelKind::affine4>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::affine4_wide: return matmul_kind<PanelKind::affine4_wide>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::sym8: return matmul_kind<PanelKind::sym8>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::sym8_wide: return matmul_kind<PanelKind::sym8_wide>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::affine8: return matmul_kind<PanelKind::affine8>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::affine8_wide: return matmul_kind<PanelKind::affine8_wide>(panel, rows, num_rows, out, scratch, next);
    case PanelKind::halves8: return matmul_kind<PanelKind::halves8>(panel, rows, num_rows, out, scratch, next);
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
  constexpr int R = kTileRows;
  for (; num_rows >= R; num_rows -= R, x += R * stride, out += R * kPanelColumns) exact_tile<R>(w, k, x, stride, out);
  for (; num_rows > 0; --num_rows, x += stride, out += kPanelColumns) exact_tile<1>(w, k, x, stride, out);
}

extern const LinearOps linear_table;
const LinearOps linear_table{matmul, matmul_exact};

}  // namespace ANB_ISA
}  // namespace anabranch
