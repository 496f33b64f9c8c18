// What tiles of every KV type share: where a block lies, what a query row sees of it, scratch, and the merging of blocks.
#pragma once

#include "attention_plan.h"
#include "mathlib.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

constexpr int kChunks = kBlock / kLanes;

// Query rows per tile, and vectors of accumulators (tile rows x 16 slots or dims each) that the registers hold.
#if defined(__AVX512F__)
constexpr int kMaxTile = 12, kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kMaxTile = 6, kAccumulators = 6;
#else
constexpr int kMaxTile = 2, kAccumulators = 2;
#endif
constexpr int kPrefetchRows = 4;  // tiles up to here wait for memory more than for arithmetic: they fetch the next block

ANB_INLINE int tile_size(int num_rows) {
  if (num_rows >= kMaxTile) return kMaxTile;
  constexpr int sizes[] = {1, 2, 3, 4, 6, 8};
  for (int size : sizes)
    if (size >= num_rows && size <= kMaxTile) return size;
  return kMaxTile;
}

// Where a block's chunks of 16 slots lie, as attention.h describes them.
struct Block {
  const uint8_t* k[kChunks];
  const uint8_t* v[kChunks];
  const float* k_scale[kChunks];
  const float* v_scale[kChunks];
};

ANB_INLINE bool has_pairs(const KVPool& kv) { return kv.type == int32_t(KVType::i8) || kv.type == int32_t(KVType::i16); }

// Where dim d of slot `offset` of a page lies in its K and V, in elements.
ANB_INLINE int64_t k_index(const KVPool& kv, int offset, int d) {
  const int64_t chunk = int64_t(offset / kv.chunk) * kv.chunk * kv.padded_dim;
  const int lane = offset % kv.chunk;
  if (has_pairs(kv)) return chunk + int64_t(d / 2) * kv.chunk * 2 + lane * 2 + d % 2;
  return chunk + int64_t(d) * kv.chunk + lane;
}
ANB_INLINE int64_t v_index(const KVPool& kv, int offset, int d) {
  if (!has_pairs(kv) || kv.chunk != kLanes) return int64_t(offset) * kv.padded_dim + d;
  return int64_t(offset / 2) * kv.padded_dim * 2 + d * 2 + offset % 2;
}

// Scratch of one thread.
struct Scratch {
  float* k;         // a block that was widened to f32, or gathered from small pages: [kChunks][padded_dim][16]
  float* v;         // [kBlock][padded_dim]
  float* k_scale;   // [kBlock]
  float* v_scale;   // [kBlock]
  float* scores;    // [kMaxTile][kBlock]
  int16_t* weights; // of integer KV, [kMaxTile][kBlock]
  float* tile_out;  // [kMaxTile][padded_dim]
  float* q;         // query rows in tiles, q_words each
  float* state;     // [query rows][padded_dim]: output so far
  float* max;       // [query rows]
  float* sum;       // [query rows]
};

ANB_INLINE int q_words(int dim) { return dim + 4; }  // per query row: q, and its scale where KV is of integers

struct Carver {
  float* next;
  float* take(int64_t num_floats) {
    float* p = next;
    next += (num_floats + kLanes - 1) / kLanes * kLanes;
    return p;
  }
};

Scratch lay_out(void* memory, int64_t dim, int64_t num_rows, int64_t* num_bytes = nullptr) {
  Scratch s;
  Carver carver{(float*)memory};
  const int64_t rows = num_rows + kLanes;  // vectors of rows run over the end
  s.k = carver.take(kBlock * dim);
  s.v = carver.take(kBlock * dim);
  s.k_scale = carver.take(kBlock);
  s.v_scale = carver.take(kBlock);
  s.scores = carver.take(kMaxTile * kBlock);
  s.weights = (int16_t*)carver.take(kMaxTile * kBlock / 2);
  s.tile_out = carver.take(kMaxTile * dim);
  s.q = carver.take(rows * q_words(int(dim)));
  s.state = carver.take(rows * dim);
  s.max = carver.take(rows);
  s.sum = carver.take(rows);
  if (num_bytes) *num_bytes = (const char*)carver.next - (const char*)memory;
  return s;
}

int64_t scratch_bytes(const KVPool& kv, int max_rows) {
  int64_t num_bytes;
  alignas(64) char origin;
  lay_out(&origin, kv.padded_dim, max_rows, &num_bytes);
  return num_bytes;
}

// What a query row sees of the block: slots relative to its start.
struct Seen {
  int lo, line_end, hi;    // [lo, line_end) all, [line_end, hi) by the tree's bits
  const uint64_t* tree;
  int tree_base;           // relative to the block, may be negative
  bool sees(int t) const { return t < line_end ? t >= lo : t < hi && (tree[(t - tree_base) >> 6] >> ((t - tree_base) & 63) & 1); }
  uint32_t mask(int chunk) const {
    const int start = chunk * kLanes, end = start + kLanes;
    uint32_t bits = first_bits(line_end - start) & ~first_bits(lo - start);
    for (int t = line_end > start ? line_end : start; t < hi && t < end; ++t) bits |= uint32_t(sees(t)) << (t - start);
    return bits;
  }
  static uint32_t first_bits(int n) { return n <= 0 ? 0 : n >= kLanes ? (1u << kLanes) - 1 : (1u << n) - 1; }
  bool sees_all(int chunk) const { return lo <= chunk * kLanes && (chunk + 1) * kLanes <= line_end; }
  bool is_empty() const {
    if (lo < line_end) return false;
    for (int t = line_end; t < hi; ++t)
      if (sees(t)) return false;
    return true;
  }
};

ANB_INLINE int clamp_to_block(int slot) { return slot < 0 ? 0 : slot > kBlock ? kBlock : slot; }

ANB_INLINE Seen seen_in_block(const Visible& visible, int block) {
  const int start = block * kBlock;
  Seen s;
  s.lo = clamp_to_block(visible.lo - start);
  s.hi = clamp_to_block(visible.hi - start);
  s.line_end = clamp_to_block(visible.base - start);
  if (s.line_end > s.hi) s.line_end = s.hi;
  if (s.lo > s.line_end) s.lo = s.line_end;
  s.tree = visible.tree;
  s.tree_base = visible.base - start;
  return s;
}

// Chunks of the block that a query row sees anything of.
ANB_INLINE int first_chunk_of(const Seen& seen) { return seen.lo / kLanes; }
ANB_INLINE int last_chunk_of(const Seen& seen) { return (seen.hi + kLanes - 1) / kLanes; }

// What R query rows see together.
struct TileView {
  int lo = kBlock, hi = 0;          // union
  int all_lo = 0, all_hi = kBlock;  // intersection, of the line
  bool is_whole = true;             // every row sees the whole block
};

// row_sum[r] becomes -1 for rows that see nothing, and 0 for the others.
template <int R>
ANB_INLINE TileView view_tile(const Seen* seen, float* row_sum) {
  TileView view;
  for (int r = 0; r < R; ++r) {
    const bool is_empty = seen[r].is_empty();
    row_sum[r] = is_empty ? -1.0f : 0.0f;
    view.is_whole = view.is_whole && seen[r].lo == 0 && seen[r].line_end == kBlock;
    if (is_empty) continue;
    view.lo = seen[r].lo < view.lo ? seen[r].lo : view.lo;
    view.hi = seen[r].hi > view.hi ? seen[r].hi : view.hi;
    view.all_lo = seen[r].lo > view.all_lo ? seen[r].lo : view.all_lo;
    view.all_hi = seen[r].line_end < view.all_hi ? seen[r].line_end : view.all_hi;
  }
  if (view.all_lo >= view.all_hi) view.all_lo = view.all_hi = kBlock;
  return view;
}

// Largest score that a query row sees. Scores that it does not see become -inf, so that their weight is exactly 0.
ANB_INLINE vf highest_seen(const Seen& seen, float* scores) {
  vf high = set1(-kInfinity);
  for (int c = first_chunk_of(seen); c < last_chunk_of(seen); ++c) {
    vf s = load(scores + c * kLanes);
    if (!seen.sees_all(c)) {
      s = select(seen.mask(c), s, set1(-kInfinity));
      store(scores + c * kLanes, s);
    }
    high = max(high, s);
  }
  return high;
}

ANB_INLINE vf highest_of_block(const float* scores) {
  vf high = load(scores);
  for (int c = 1; c < kChunks; ++c) high = max(high, load(scores + c * kLanes));
  return high;
}

// Folds one block's results of query rows [first, first + n), n <= 16, into their states. A row sum of -1 says that the row has none, in the
// block or in the state.
ANB_INLINE void merge(const Scratch& s, int dim, int first, int n, const float* const* out, const float* row_max, const float* row_sum) {
  const vf old_max = load(s.max + first), new_max = load(row_max), old_sum = load(s.sum + first), new_sum = load(row_sum);
  const uint32_t has_new = ~is_equal(new_sum, set1(-1.0f)) & ((1u << n) - 1), has_old = ~is_equal(old_sum, set1(-1.0f));
  const vf top = max(old_max, new_max);
  const vf a = exp2(sub(old_max, top)), b = exp2(sub(new_max, top));
  store(s.max + first, select(has_new & has_old, top, select(has_new, new_max, old_max)));
  store(s.sum + first, select(has_new & has_old, add(mul(old_sum, a), mul(new_sum, b)), select(has_new, new_sum, old_sum)));
  float old_weight[kLanes], new_weight[kLanes];
  store(old_weight, a);
  store(new_weight, b);
  for (int i = 0; i < n; ++i) {
    float* state = s.state + int64_t(first + i) * dim;
    if (!(has_new >> i & 1)) continue;
    if (has_old >> i & 1) {
      const vf x = set1(old_weight[i]), y = set1(new_weight[i]);
      for (int d = 0; d < dim; d += kLanes) store(state + d, fma(load(state + d), x, mul(load(out[i] + d), y)));
    } else {
      for (int d = 0; d < dim; d += kLanes) store(state + d, load(out[i] + d));
    }
  }
}

ANB_INLINE void finish(const float* state, float sum, int head_dim, float* out) {
  const vf total = set1(1.0f / sum);
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(out + d, mul(load(state + d), total));
  if (d < head_dim) {
    float rest[kLanes];
    store(rest, mul(load(state + d), total));
    for (int i = 0; d + i < head_dim; ++i) out[d + i] = rest[i];
  }
}

}  // namespace
}  // namespace ANB_ISA
}  // namespace anabranch
