// The inner kernels of attention, once per instruction set.
//
// One (query token, head) is a *query row*. For each block of kBlock slots that it sees anything of, attend_tile computes
//     s[t] = chain of fma over dims (q scaled by scale * log2 e)       p[t] = 2^(s[t] - max)       l = sum of p, 16 lanes by slot % 16
//     o[d] = chain of fma over the slots that it sees, ascending
// and merge() folds (max, l, o) of its blocks in ascending order. These chains are all there is to the result, and each belongs to one
// query row alone; tiles (which query rows share a load of K or V) only decide which chains run side by side in registers. So a
// decode row, a row of a prompt and a row of a shared-prefix group give the same bits. Slots that a row does not see are never read
// into its chains: their memory may hold anything.
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
constexpr int kConvertRows = 2 * kMaxTile;  // from here on, widening a block to f32 once pays

ANB_INLINE int tile_size(int num_rows) {
  if (num_rows >= kMaxTile) return kMaxTile;
  constexpr int sizes[] = {1, 2, 3, 4, 6, 8};
  for (int size : sizes)
    if (size >= num_rows && size <= kMaxTile) return size;
  return kMaxTile;
}

constexpr int kPrefetchRows = 4;            // tiles up to here wait for memory more than for arithmetic: they fetch the next block

// Where a block's chunks of 16 slots lie: K [padded_dim][16], V [16][padded_dim]; per-slot scales for i8.
struct Block {
  const uint8_t* k[kChunks];
  const uint8_t* v[kChunks];
  const float* k_scale[kChunks];
  const float* v_scale[kChunks];
};

struct F32 {
  static constexpr int size = 4;
  template <int J> ANB_INLINE vf load_k(const uint8_t* tile, int d) { return load((const float*)tile + (d + J) * kLanes); }
  ANB_INLINE vf load_v(const uint8_t* row, int i) { return load((const float*)row + i); }
  ANB_INLINE float element_k(const uint8_t* p, int64_t i) { return ((const float*)p)[i]; }
};
struct F16 {
  static constexpr int size = 2;
  template <int J> ANB_INLINE vf load_k(const uint8_t* tile, int d) { return load_half((const uint16_t*)tile + (d + J) * kLanes); }
  ANB_INLINE vf load_v(const uint8_t* row, int i) { return load_half((const uint16_t*)row + i); }
  ANB_INLINE float element_k(const uint8_t* p, int64_t i) { return half_to_float(((const uint16_t*)p)[i]); }
};
struct BF16 {
  static constexpr int size = 2;
  template <int J> ANB_INLINE vf load_k(const uint8_t* tile, int d) { return load_bfloat((const uint16_t*)tile + (d + J) * kLanes); }
  ANB_INLINE vf load_v(const uint8_t* row, int i) { return load_bfloat((const uint16_t*)row + i); }
  ANB_INLINE float element_k(const uint8_t* p, int64_t i) { return bfloat_to_float(((const uint16_t*)p)[i]); }
};
struct I8 {
  static constexpr int size = 1;
  template <int J> ANB_INLINE vf load_k(const uint8_t* tile, int d) { return load_i8_of_four<J>(tile + d * kLanes); }
  ANB_INLINE vf load_v(const uint8_t* row, int i) { return load_i8((const int8_t*)row + i); }
  ANB_INLINE float element_k(const uint8_t* p, int64_t i) { return float(int(p[i]) - 128); }
};

// Scratch of one thread.
struct Scratch {
  float* k;       // a widened block [kChunks][padded_dim][16]
  float* v;       // [kBlock][padded_dim]
  float* k_scale; // [kBlock]
  float* v_scale; // [kBlock]
  float* scores;  // [kMaxTile][kBlock]
  float* tile_out;  // [kMaxTile][padded_dim]
  float* q;       // query rows in tiles, each [padded_dim][tile rows]
  float* state;   // [query rows][padded_dim]: output so far
  float* max;     // [query rows]
  float* sum;     // [query rows]
};

int64_t scratch_bytes(const KVPool& kv, int max_rows) {
  const int64_t dim = kv.padded_dim, rows = max_rows + kLanes;
  return 4 * (2 * kBlock * dim + 2 * kBlock + kMaxTile * (kBlock + dim) + rows * (2 * dim + 2));
}

Scratch lay_out(void* memory, const KVPool& kv, int num_rows) {
  Scratch s;
  const int64_t dim = kv.padded_dim;
  float* p = (float*)memory;
  s.k = p, p += kBlock * dim;
  s.v = p, p += kBlock * dim;
  s.k_scale = p, p += kBlock;
  s.v_scale = p, p += kBlock;
  s.scores = p, p += kMaxTile * kBlock;
  s.tile_out = p, p += kMaxTile * dim;
  s.q = p, p += (num_rows + kLanes) * dim;
  s.state = p, p += (num_rows + kLanes) * dim;
  s.max = p, p += num_rows + kLanes;
  s.sum = p;
  return s;
}

// ---- One tile of R query rows against one block ----

// Scores of R rows against C chunks.
template <class T, bool kScaled, int R, int C>
ANB_INLINE void score_chunks(const Block& block, const Block& ahead, int chunk, const float* q, int dim, float* scores) {
  vf sum[R][C];
  const uint8_t* k[C];
  for (int c = 0; c < C; ++c) k[c] = block.k[chunk + c];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zero();
  for (int d = 0; d < dim; d += 4) {
#define ANB_STEP(J)                                                              \
  {                                                                              \
    vf x[C];                                                                     \
    for (int c = 0; c < C; ++c) x[c] = T::template load_k<J>(k[c], d);           \
    for (int r = 0; r < R; ++r) {                                                \
      const vf y = set1(q[(d + J) * R + r]);                                     \
      for (int c = 0; c < C; ++c) sum[r][c] = fma(y, x[c], sum[r][c]);           \
    }                                                                            \
  }
    ANB_STEP(0) ANB_STEP(1) ANB_STEP(2) ANB_STEP(3)
#undef ANB_STEP
    if (R <= kPrefetchRows)
      for (int c = 0; c < C; ++c)
        for (int line = 0; line < T::size; ++line) prefetch(ahead.k[chunk + c] + d * kLanes * T::size + line * 64);
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      const vf s = kScaled ? mul(sum[r][c], load(block.k_scale[chunk + c])) : sum[r][c];
      store(scores + r * kBlock + (chunk + c) * kLanes, s);
    }
}

template <class T, bool kScaled, int R>
void score_tile(const Block& block, const Block& ahead, int first_chunk, int last_chunk, const float* q, int dim, float* scores) {
  constexpr int C = kAccumulators / R >= 8 ? 8 : kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int c = first_chunk;
  for (; c + C <= last_chunk; c += C) score_chunks<T, kScaled, R, C>(block, ahead, c, q, dim, scores);
  for (; c < last_chunk; ++c) score_chunks<T, kScaled, R, 1>(block, ahead, c, q, dim, scores);
}

// What a query row sees of the block: slots relative to its start.
struct Seen {
  int lo, line_end, hi;    // [lo, line_end) all, [line_end, hi) by the tree's bits
  const uint64_t* tree;
  int tree_base;           // relative to the block, may be negative
  bool sees(int t) const { return t < line_end ? t >= lo : t < hi && (tree[(t - tree_base) >> 6] >> ((t - tree_base) & 63) & 1); }
  uint32_t mask(int chunk) const {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(sees(chunk * kLanes + i)) << i;
    return bits;
  }
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

// Scores -> weights 2^(score - top) in place, times V's scale; returns the weights' sum before that, lane by lane.
template <bool kScaled>
ANB_INLINE vf weigh(const Block& block, int first_chunk, int last_chunk, float top, float* scores) {
  const vf shift = set1(top);
  vf sum = zero();
  for (int c = first_chunk; c < last_chunk; ++c) {
    vf p = exp2(sub(load(scores + c * kLanes), shift));
    sum = add(sum, p);
    if (kScaled) p = mul(p, load(block.v_scale[c]));
    store(scores + c * kLanes, p);
  }
  return sum;
}

// All R rows that see something: scores -> weights, and each row's max and sum. kWhole: every row sees the whole block.
template <bool kScaled, bool kWhole, int R>
ANB_INLINE void weigh_tile(const Block& block, const Seen* seen, const bool* is_empty, float* scores, float* row_max, float* row_sum) {
  for (int r = 0; r < R; ++r) {
    if (kWhole) {
      vf high = load(scores + r * kBlock);
      for (int c = 1; c < kChunks; ++c) high = max(high, load(scores + r * kBlock + c * kLanes));
      row_max[r] = hmax(high);
    } else if (!is_empty[r]) {
      row_max[r] = hmax(highest_seen(seen[r], scores + r * kBlock));
    }
  }
  for (int r = 0; r < R; ++r) {
    if (!kWhole && is_empty[r]) continue;
    const int first = kWhole ? 0 : first_chunk_of(seen[r]), last = kWhole ? kChunks : last_chunk_of(seen[r]);
    row_sum[r] = hsum(weigh<kScaled>(block, first, last, row_max[r], scores + r * kBlock));
  }
}

// out[r][z] += p[r][t] * v[t][z] for slots [first, last), Z vectors of dims from `dim0` on.
template <class T, int R, int Z>
ANB_INLINE void accumulate(const Block& block, const Block& ahead, int first, int last, const float* weights, int dim, int dim0, float* out) {
  vf sum[R][Z];
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) sum[r][z] = load(out + r * dim + dim0 + z * kLanes);
  for (int t = first; t < last;) {
    const int chunk = t / kLanes, end = (chunk + 1) * kLanes < last ? (chunk + 1) * kLanes : last;
    const int offset = ((t % kLanes) * dim + dim0) * T::size;
    const uint8_t *v = block.v[chunk] + offset, *next = ahead.v[chunk] + offset;
    for (; t < end; ++t, v += dim * T::size, next += dim * T::size) {
      if (R <= kPrefetchRows)
        for (int byte = 0; byte < Z * kLanes * T::size; byte += 64) prefetch(next + byte);
      vf x[Z];
      for (int z = 0; z < Z; ++z) x[z] = T::load_v(v, z * kLanes);
      for (int r = 0; r < R; ++r) {
        const vf p = set1(weights[r * kBlock + t]);
        for (int z = 0; z < Z; ++z) sum[r][z] = fma(p, x[z], sum[r][z]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) store(out + r * dim + dim0 + z * kLanes, sum[r][z]);
}

template <class T, int R>
void accumulate_tile(const Block& block, const Block& ahead, int first, int last, const float* weights, int dim, float* out) {
  constexpr int Z = kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int d = 0;
  for (; d + Z * kLanes <= dim; d += Z * kLanes) accumulate<T, R, Z>(block, ahead, first, last, weights, dim, d, out);
  for (; d < dim; d += kLanes) accumulate<T, R, 1>(block, ahead, first, last, weights, dim, d, out);
}

template <class T>
ANB_INLINE void accumulate_seen(const Block& block, const Seen& seen, int first, int last, const float* weights, int dim, float* out) {
  for (int t = first; t < last; ++t)
    if (seen.sees(t)) accumulate_tile<T, 1>(block, block, t, t + 1, weights, dim, out);
}

// R query rows against one block: max[r], sum[r] (-1: sees nothing), out[r][dim]. `q` is [dim][R].
template <class T, bool kScaled, int R>
void attend_tile(const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, float* scores, float* out, float* row_max, float* row_sum) {
  int lo = kBlock, hi = 0, all_lo = 0, all_hi = kBlock;  // union and intersection of what the rows see
  bool is_empty[R];
  int num_empty = 0;
  for (int r = 0; r < R; ++r) {
    is_empty[r] = seen[r].is_empty();
    num_empty += is_empty[r];
    row_sum[r] = -1.0f;
    if (is_empty[r]) continue;
    lo = seen[r].lo < lo ? seen[r].lo : lo;
    hi = seen[r].hi > hi ? seen[r].hi : hi;
    all_lo = seen[r].lo > all_lo ? seen[r].lo : all_lo;
    all_hi = seen[r].line_end < all_hi ? seen[r].line_end : all_hi;
  }
  if (lo >= hi) return;
  score_tile<T, kScaled, R>(block, ahead, lo / kLanes, (hi + kLanes - 1) / kLanes, q, dim, scores);
  if (all_lo == 0 && all_hi == kBlock && num_empty == 0) weigh_tile<kScaled, true, R>(block, seen, is_empty, scores, row_max, row_sum);
  else weigh_tile<kScaled, false, R>(block, seen, is_empty, scores, row_max, row_sum);
  for (int i = 0; i < R * dim; i += kLanes) store(out + i, zero());
  if (all_lo >= all_hi) all_lo = all_hi = kBlock;
  for (int r = 0; r < R; ++r)
    if (!is_empty[r] && seen[r].lo < all_lo) {
      const int end = seen[r].hi < all_lo ? seen[r].hi : all_lo;
      accumulate_seen<T>(block, seen[r], seen[r].lo, end, scores + r * kBlock, dim, out + r * dim);
    }
  if (all_lo < all_hi) accumulate_tile<T, R>(block, ahead, all_lo, all_hi, scores, dim, out);
  for (int r = 0; r < R; ++r)
    if (!is_empty[r] && all_hi < seen[r].hi)
      accumulate_seen<T>(block, seen[r], all_hi, seen[r].hi, scores + r * kBlock, dim, out + r * dim);
}

template <class T, bool kScaled>
ANB_INLINE void attend(int tile, const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s, float* row_max, float* row_sum) {
  switch (tile) {
#define ANB_CASE(R) \
  case R: attend_tile<T, kScaled, R>(block, ahead, seen, q, dim, s.scores, s.tile_out, row_max, row_sum); break;
    ANB_CASE(1) ANB_CASE(2)
#if defined(__AVX2__)
    ANB_CASE(3) ANB_CASE(4) ANB_CASE(6)
#endif
#if defined(__AVX512F__)
    ANB_CASE(8) ANB_CASE(12)
#endif
#undef ANB_CASE
  }
}

// ---- Merging blocks ----

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

// ---- Finding blocks ----

// A block of one sequence, as far as it has slots.
struct Place {
  const int32_t* pages;
  int kv_head, block, num_slots;
};

ANB_INLINE Place place_of(const Row& row, int kv_head, int block) {
  const int rest = row.kv_len - block * kBlock;
  return {row.pages, kv_head, block, rest < kBlock ? rest : kBlock};
}

template <class T>
ANB_INLINE void locate(const Job& job, const Place& place, Block* found) {
  const KVPool& kv = *job.kv;
  const int chunks_per_page = kv.page_size / kLanes, chunk_bytes = kv.padded_dim * kLanes * T::size;
  int page = place.block * kChunks / chunks_per_page, chunk = place.block * kChunks % chunks_per_page;
  for (int c = 0; c * kLanes < place.num_slots; ++c) {
    const uint8_t* head = job.layer + place.pages[page] * kv.page_bytes + place.kv_head * kv.head_bytes;
    found->k[c] = head + int64_t(chunk) * chunk_bytes;
    found->v[c] = found->k[c] + kv.v_offset;
    if (T::size == 1) {
      found->k_scale[c] = (const float*)(head + kv.scale_offset) + chunk * kLanes;
      found->v_scale[c] = found->k_scale[c] + kv.page_size;
    }
    if (++chunk == chunks_per_page) chunk = 0, ++page;
  }
}

void point_at_scratch(const Scratch& s, int dim, Block* block) {
  for (int c = 0; c < kChunks; ++c) {
    block->k[c] = (const uint8_t*)(s.k + c * dim * kLanes);
    block->v[c] = (const uint8_t*)(s.v + c * dim * kLanes);
    block->k_scale[c] = s.k_scale + c * kLanes;
    block->v_scale[c] = s.v_scale + c * kLanes;
  }
}

// A block as f32 (scales apart), from pages that hold whole chunks.
template <class T>
void widen(const Block& from, int num_slots, int dim, const Scratch& s) {
  for (int c = 0; c * kLanes < num_slots; ++c) {
    float* k = s.k + c * dim * kLanes;
    for (int d = 0; d < dim; d += 4) {
      store(k + d * kLanes, T::template load_k<0>(from.k[c], d));
      store(k + (d + 1) * kLanes, T::template load_k<1>(from.k[c], d));
      store(k + (d + 2) * kLanes, T::template load_k<2>(from.k[c], d));
      store(k + (d + 3) * kLanes, T::template load_k<3>(from.k[c], d));
    }
    float* v = s.v + c * dim * kLanes;
    for (int i = 0; i < dim * kLanes; i += kLanes) store(v + i, T::load_v(from.v[c], i));
    if (T::size == 1) {
      store(s.k_scale + c * kLanes, load(from.k_scale[c]));
      store(s.v_scale + c * kLanes, load(from.v_scale[c]));
    }
  }
}

// Where dim d of slot `offset` of a page lies in its K, in elements.
ANB_INLINE int64_t k_index(const KVPool& kv, int offset, int d) {
  const int64_t chunk = int64_t(offset / kv.chunk) * kv.chunk * kv.padded_dim;
  const int lane = offset % kv.chunk;
  if (kv.type == int32_t(KVType::i8)) return chunk + int64_t(d / 4) * kv.chunk * 4 + lane * 4 + d % 4;
  return chunk + int64_t(d) * kv.chunk + lane;
}

// A block as f32, from pages of any size.
template <class T>
void gather(const Job& job, int kv_head, const int32_t* pages, int block, int num_slots, const Scratch& s) {
  const KVPool& kv = *job.kv;
  const int dim = kv.padded_dim;
  for (int t = 0; t < num_slots; ++t) {
    const int slot = block * kBlock + t, offset = slot % kv.page_size;
    const uint8_t* head = job.layer + pages[slot / kv.page_size] * kv.page_bytes + kv_head * kv.head_bytes;
    const uint8_t* v = head + kv.v_offset + int64_t(offset) * dim * T::size;
    float* k = s.k + t / kLanes * dim * kLanes + t % kLanes;
    for (int d = 0; d < dim; ++d) k[d * kLanes] = T::element_k(head, k_index(kv, offset, d));
    for (int d = 0; d < dim; d += kLanes) store(s.v + t * dim + d, T::load_v(v, d));
    if (T::size == 1) {
      s.k_scale[t] = ((const float*)(head + kv.scale_offset))[offset];
      s.v_scale[t] = ((const float*)(head + kv.scale_offset))[kv.page_size + offset];
    }
  }
}

// ---- Units ----

// Query rows [first, last) of a span: token first_token + i / heads, head kv_head * heads + i % heads.
struct QueryRows {
  const Job& job;
  const Span& span;
  int kv_head;
  int token(int i) const { return span.first_token + i / job.heads_per_kv; }
  int head(int i) const { return kv_head * job.heads_per_kv + i % job.heads_per_kv; }
  int count() const { return (span.last_token - span.first_token) * job.heads_per_kv; }
  int index_of(int token_id) const { return (token_id - span.first_token) * job.heads_per_kv; }
  float* partial(int i, int block) const {
    const int64_t num_blocks = span.last_block - span.first_block;
    const int64_t row = int64_t(kv_head) * count() + i;
    return job.partials + (span.partial_index + row * num_blocks + block - span.first_block) * job.partial_stride;
  }
};

// Query rows [first, last), scaled, tile by tile as [padded_dim][tile rows], so that a tile is read in one line.
void pack_q(const QueryRows& rows, int first, int last, float* packed) {
  const KVPool& kv = *rows.job.kv;
  const vf scale = set1(rows.job.scale);
  for (int i = first, tile; i < last; i += tile, packed += tile * kv.padded_dim) {
    tile = tile_size(last - i);
    for (int r = 0; r < tile; ++r) {
      const float* q = rows.job.q + rows.token(i + r) * rows.job.q_stride + rows.head(i + r) * kv.head_dim;
      for (int d = 0; d < kv.padded_dim; d += kLanes) {
        float rest[kLanes] = {};
        const int n = i + r >= last ? 0 : kv.head_dim - d;
        if (n < kLanes)
          for (int j = 0; j < n; ++j) rest[j] = q[d + j];
        scatter(packed + d * tile + r, tile, mul(load(n < kLanes ? rest : q + d), scale));
      }
    }
  }
}

ANB_INLINE void store_partial(float* partial, const float* out, int dim, float row_max, float row_sum) {
  partial[dim] = row_max;
  partial[dim + 1] = row_sum;
  if (row_sum == -1.0f) return;
  for (int d = 0; d < dim; d += kLanes) store(partial + d, load(out + d));
}

// Query rows [first, last), whose pages are the same there, against one block; results into the state or the partials. `ahead` is the block
// that comes next (num_slots 0: none).
template <class T>
void attend_block(const QueryRows& rows, int first, int last, const int32_t* pages, int block, const Place& ahead, bool to_partials, const Scratch& s) {
  const Job& job = rows.job;
  const KVPool& kv = *job.kv;
  const int dim = kv.padded_dim, start = block * kBlock;
  int num_slots = 0;
  for (int token = rows.token(first); token <= rows.token(last - 1); ++token) {
    const int end = clamp_to_block(job.visible[token].hi - start);
    if (job.visible[token].lo - start < kBlock && end > num_slots) num_slots = end;
  }
  Block found, next;
  const bool has_chunks = kv.chunk == kLanes;
  const bool in_scratch = !has_chunks || (last - first >= kConvertRows && T::size < 4);
  if (has_chunks) locate<T>(job, {pages, rows.kv_head, block, num_slots}, &found);
  if (in_scratch) {
    if (has_chunks) widen<T>(found, num_slots, dim, s);
    else gather<T>(job, rows.kv_head, pages, block, num_slots, s);
    point_at_scratch(s, dim, &found);
  }
  next = found;
  if (!in_scratch && ahead.num_slots > 0) locate<T>(job, ahead, &next);

  const float* q = s.q;
  for (int i = first, tile; i < last; i += tile, q += tile * dim) {
    tile = tile_size(last - i);
    Seen seen[kMaxTile];
    float row_max[kLanes] = {}, row_sum[kLanes] = {};
    for (int r = 0; r < tile; ++r) seen[r] = seen_in_block(job.visible[rows.token(i + r < last ? i + r : last - 1)], block);
    if (in_scratch) attend<F32, T::size == 1>(tile, found, next, seen, q, dim, s, row_max, row_sum);
    else attend<T, T::size == 1>(tile, found, next, seen, q, dim, s, row_max, row_sum);
    const int n = last - i < tile ? last - i : tile;
    if (to_partials) {
      for (int r = 0; r < n; ++r) store_partial(rows.partial(i + r, block), s.tile_out + r * dim, dim, row_max[r], row_sum[r]);
    } else {
      const float* out[kLanes];
      for (int r = 0; r < n; ++r) out[r] = s.tile_out + r * dim;
      merge(s, dim, i, n, out, row_max, row_sum);
    }
  }
}

void clear_states(const Scratch& s, int num_rows) {
  for (int i = 0; i < num_rows; i += kLanes) store(s.sum + i, set1(-1.0f)), store(s.max + i, zero());
}

void finish_rows(const QueryRows& rows, const Scratch& s) {
  const KVPool& kv = *rows.job.kv;
  for (int i = 0; i < rows.count(); ++i)
    finish(s.state + int64_t(i) * kv.padded_dim, s.sum[i], kv.head_dim,
           rows.job.out + rows.token(i) * rows.job.out_stride + rows.head(i) * kv.head_dim);
}

// The part of `row` that lies in the span.
ANB_INLINE int first_of(const QueryRows& rows, const Row& row) {
  return rows.index_of(row.first_token > rows.span.first_token ? row.first_token : rows.span.first_token);
}
ANB_INLINE int last_of(const QueryRows& rows, const Row& row) {
  return rows.index_of(row.last_token < rows.span.last_token ? row.last_token : rows.span.last_token);
}

ANB_INLINE int first_own_block(const Span& span, const Row& row) {
  return row.first_block > span.shared_blocks ? row.first_block : span.shared_blocks;
}

// The first block of a unit's work.
ANB_INLINE Place start_of(const Job& job, const Unit& unit) {
  const Span& span = job.spans[unit.span];
  const Row& row = job.rows[unit.kind == UnitKind::own ? unit.row : span.first_row];
  if (unit.kind != UnitKind::whole) return place_of(row, unit.kv_head, unit.first_block);
  return place_of(row, unit.kv_head, span.first_block < span.shared_blocks ? span.first_block : first_own_block(span, row));
}

template <class T>
void run_shared(const QueryRows& rows, int first_block, int last_block, const Place& after, bool to_partials, const Scratch& s) {
  if (first_block >= last_block) return;
  const Row& row = rows.job.rows[rows.span.first_row];
  pack_q(rows, 0, rows.count(), s.q);
  for (int b = first_block; b < last_block; ++b)
    attend_block<T>(rows, 0, rows.count(), row.pages, b, b + 1 < last_block ? place_of(row, rows.kv_head, b + 1) : after, to_partials, s);
}

template <class T>
void run_own(const QueryRows& rows, int row_id, int first_block, int last_block, const Place& after, bool to_partials, const Scratch& s) {
  const Row& row = rows.job.rows[row_id];
  const int first = first_of(rows, row), last = last_of(rows, row);
  if (first >= last || first_block >= last_block) return;
  pack_q(rows, first, last, s.q);
  for (int b = first_block; b < last_block; ++b)
    attend_block<T>(rows, first, last, row.pages, b, b + 1 < last_block ? place_of(row, rows.kv_head, b + 1) : after, to_partials, s);
}

template <class T>
void run_whole(const QueryRows& rows, const Place& after, const Scratch& s) {
  const Span& span = rows.span;
  const Row* all = rows.job.rows;
  const auto start_of_row = [&](int r) { return r < span.last_row ? place_of(all[r], rows.kv_head, first_own_block(span, all[r])) : after; };
  clear_states(s, rows.count());
  run_shared<T>(rows, span.first_block, span.shared_blocks, start_of_row(span.first_row), false, s);
  for (int r = span.first_row; r < span.last_row; ++r)
    run_own<T>(rows, r, first_own_block(span, all[r]), all[r].last_block, start_of_row(r + 1), false, s);
}

void merge_partials(const QueryRows& rows, const Scratch& s) {
  const int dim = rows.job.kv->padded_dim;
  clear_states(s, rows.count());
  for (int r = rows.span.first_row; r < rows.span.last_row; ++r) {
    const Row& row = rows.job.rows[r];
    for (int i = first_of(rows, row), n; i < last_of(rows, row); i += n) {
      n = last_of(rows, row) - i < kLanes ? last_of(rows, row) - i : kLanes;
      const auto fold = [&](int block) {
        const float* out[kLanes];
        float row_max[kLanes] = {}, row_sum[kLanes] = {};
        for (int j = 0; j < n; ++j) {
          out[j] = rows.partial(i + j, block);
          row_max[j] = out[j][dim];
          row_sum[j] = out[j][dim + 1];
        }
        merge(s, dim, i, n, out, row_max, row_sum);
      };
      for (int b = rows.span.first_block; b < rows.span.shared_blocks; ++b) fold(b);
      for (int b = first_own_block(rows.span, row); b < row.last_block; ++b) fold(b);
    }
  }
}

template <class T>
void run_unit_of(const Job& job, const Unit& unit, const Unit* next, void* memory) {
  const Span& span = job.spans[unit.span];
  const QueryRows rows{job, span, unit.kv_head};
  const Scratch s = lay_out(memory, *job.kv, rows.count());
  const Place after = next ? start_of(job, *next) : Place{};
  switch (unit.kind) {
    case UnitKind::whole: run_whole<T>(rows, after, s); return finish_rows(rows, s);
    case UnitKind::shared: run_shared<T>(rows, unit.first_block, unit.last_block, after, true, s); break;
    case UnitKind::own: run_own<T>(rows, unit.row, unit.first_block, unit.last_block, after, true, s); break;
  }
  std::atomic<int32_t>& remaining = job.remaining[int64_t(unit.span) * job.kv->num_kv_heads + unit.kv_head];
  if (remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  remaining.store(job.num_units[unit.span], std::memory_order_relaxed);  // for the next layer
  merge_partials(rows, s);
  finish_rows(rows, s);
}

void run_unit(const Job& job, const Unit& unit, const Unit* next, void* scratch) {
  switch (KVType(job.kv->type)) {
    case KVType::f32: return run_unit_of<F32>(job, unit, next, scratch);
    case KVType::f16: return run_unit_of<F16>(job, unit, next, scratch);
    case KVType::bf16: return run_unit_of<BF16>(job, unit, next, scratch);
    case KVType::i8: return run_unit_of<I8>(job, unit, next, scratch);
  }
}

// ---- Writing KV ----

constexpr float kMaxHalf = 65504.0f;

// Scale of 127 steps; NaN or infinity anywhere makes it so, and with it every score or output of the slot.
ANB_INLINE float i8_scale(const float* x, int n) {
  float top = 0.0f;
  for (int d = 0; d < n; ++d) {
    const float size = fabsf(x[d]);
    top = !(size <= top) ? size : top;
    if (top != top) break;
  }
  return top / 127.0f;
}

ANB_INLINE uint32_t quantize(float x, float inverse) {  // two's complement
  const float y = x * inverse;
  return uint32_t(int32_t(y != y ? 0.0f : __builtin_rintf(y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y)));
}

void write_slot_i8(const KVPool& kv, uint8_t* head, int offset, const float* k, const float* v) {
  float* scales = (float*)(head + kv.scale_offset);
  const float k_scale = i8_scale(k, kv.head_dim), v_scale = i8_scale(v, kv.head_dim);
  scales[offset] = k_scale;
  scales[kv.page_size + offset] = v_scale;
  const float k_inverse = k_scale > 0.0f ? 1.0f / k_scale : 0.0f, v_inverse = v_scale > 0.0f ? 1.0f / v_scale : 0.0f;
  uint8_t* v_row = head + kv.v_offset + int64_t(offset) * kv.padded_dim;
  for (int d = 0; d < kv.padded_dim; ++d) {
    const bool is_real = d < kv.head_dim;
    head[k_index(kv, offset, d)] = uint8_t((is_real ? quantize(k[d], k_inverse) : 0) + 128);
    v_row[d] = uint8_t(is_real ? quantize(v[d], v_inverse) : 0);
  }
}

// Sixteen numbers as the pool stores them, to dst[0], dst[stride] ...
template <KVType type>
ANB_INLINE void put16(uint8_t* dst, int64_t stride, vf x) {
  if (type == KVType::f32) {
    if (stride == 1) store((float*)dst, x);
    else scatter((float*)dst, int(stride), x);
    return;
  }
  uint16_t words[kLanes];
  if (type == KVType::f16) {
    store_half(words, min(set1(kMaxHalf), max(set1(-kMaxHalf), x)));  // NaN stays
  } else {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) words[i] = float_to_bfloat(lanes[i]);
  }
  if (stride == 1) memcpy(dst, words, sizeof(words));
  else
    for (int i = 0; i < kLanes; ++i) ((uint16_t*)dst)[i * stride] = words[i];
}

template <KVType type>
ANB_INLINE void write_slot(const KVPool& kv, uint8_t* head, int offset, const float* k, const float* v) {
  constexpr int size = type == KVType::f32 ? 4 : 2;
  uint8_t* k_column = head + k_index(kv, offset, 0) * size;
  uint8_t* v_row = head + kv.v_offset + int64_t(offset) * kv.padded_dim * size;
  for (int d = 0; d < kv.padded_dim; d += kLanes) {
    const int n = kv.head_dim - d;
    float rest[2][kLanes] = {};
    if (n < kLanes)
      for (int j = 0; j < n; ++j) rest[0][j] = k[d + j], rest[1][j] = v[d + j];
    put16<type>(k_column + int64_t(d) * kv.chunk * size, kv.chunk, load(n < kLanes ? rest[0] : k + d));
    put16<type>(v_row + d * size, 1, load(n < kLanes ? rest[1] : v + d));
  }
}

void write_kv(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_tokens, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride) {
  uint8_t* base = kv.data + layer * kv.layer_bytes + kv_head * kv.head_bytes;
  for (int i = 0; i < num_tokens; ++i, k += k_stride, v += v_stride) {
    uint8_t* head = base + slots[i].page_id * kv.page_bytes;
    switch (KVType(kv.type)) {
      case KVType::f32: write_slot<KVType::f32>(kv, head, slots[i].offset, k, v); break;
      case KVType::f16: write_slot<KVType::f16>(kv, head, slots[i].offset, k, v); break;
      case KVType::bf16: write_slot<KVType::bf16>(kv, head, slots[i].offset, k, v); break;
      case KVType::i8: write_slot_i8(kv, head, slots[i].offset, k, v); break;
    }
  }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {scratch_bytes, run_unit, write_kv};

}  // namespace ANB_ISA
}  // namespace anabranch
