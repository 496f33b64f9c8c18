// Tiles over KV in f32, f16 or bf16: chains of float32 fma.
//
//     s[t] = chain over dims of q[d] * k[t][d]      p[t] = 2^(s[t] - max)      o[d] = chain over the slots that the row sees, ascending
//
// Slots that a row does not see never enter its chains: K lanes do not mix, and o's chain skips them. Their memory may hold anything.
#pragma once

#include "attention_tile.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

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

// Scores of R rows against C chunks.
template <class T, int R, int C>
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
    for (int r = 0; r < R; ++r) store(scores + r * kBlock + (chunk + c) * kLanes, sum[r][c]);
}

template <class T, int R>
void score_tile(const Block& block, const Block& ahead, int first_chunk, int last_chunk, const float* q, int dim, float* scores) {
  constexpr int C = kAccumulators / R >= 8 ? 8 : kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int c = first_chunk;
  for (; c + C <= last_chunk; c += C) score_chunks<T, R, C>(block, ahead, c, q, dim, scores);
  for (; c < last_chunk; ++c) score_chunks<T, R, 1>(block, ahead, c, q, dim, scores);
}

// Scores -> weights 2^(score - top) in place. Returns their sum, lane by lane.
ANB_INLINE vf weigh(int first_chunk, int last_chunk, float top, float* scores) {
  const vf shift = set1(top);
  vf sum = zero();
  for (int c = first_chunk; c < last_chunk; ++c) {
    const vf p = exp2(sub(load(scores + c * kLanes), shift));
    sum = add(sum, p);
    store(scores + c * kLanes, p);
  }
  return sum;
}

// All R rows that see something: scores -> weights, and each row's max and sum. kWhole: every row sees the whole block.
template <bool kWhole, int R>
ANB_INLINE void weigh_tile(const Seen* seen, float* scores, float* row_max, float* row_sum) {
  for (int r = 0; r < R; ++r) {
    if (kWhole) row_max[r] = hmax(highest_of_block(scores + r * kBlock));
    else if (row_sum[r] == 0.0f) row_max[r] = hmax(highest_seen(seen[r], scores + r * kBlock));
  }
  for (int r = 0; r < R; ++r) {
    if (kWhole) row_sum[r] = hsum(weigh(0, kChunks, row_max[r], scores + r * kBlock));
    else if (row_sum[r] == 0.0f) row_sum[r] = hsum(weigh(first_chunk_of(seen[r]), last_chunk_of(seen[r]), row_max[r], scores + r * kBlock));
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
template <class T, int R>
void attend_tile(const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s, float* row_max, float* row_sum) {
  const TileView view = view_tile<R>(seen, row_sum);
  if (view.lo >= view.hi) return;
  float *scores = s.scores, *out = s.tile_out;
  score_tile<T, R>(block, ahead, view.lo / kLanes, (view.hi + kLanes - 1) / kLanes, q, dim, scores);
  if (view.is_whole) weigh_tile<true, R>(seen, scores, row_max, row_sum);
  else weigh_tile<false, R>(seen, scores, row_max, row_sum);
  for (int i = 0; i < R * dim; i += kLanes) store(out + i, zero());
  // Ascending for each row: what only it sees, what all see, what only it sees.
  for (int r = 0; r < R; ++r)
    if (row_sum[r] != -1.0f && seen[r].lo < view.all_lo) {
      const int end = seen[r].hi < view.all_lo ? seen[r].hi : view.all_lo;
      accumulate_seen<T>(block, seen[r], seen[r].lo, end, scores + r * kBlock, dim, out + r * dim);
    }
  if (view.all_lo < view.all_hi) accumulate_tile<T, R>(block, ahead, view.all_lo, view.all_hi, scores, dim, out);
  for (int r = 0; r < R; ++r)
    if (row_sum[r] != -1.0f && view.all_hi < seen[r].hi)
      accumulate_seen<T>(block, seen[r], view.all_hi, seen[r].hi, scores + r * kBlock, dim, out + r * dim);
}

// ---- Blocks and queries as these tiles want them ----

// A block as f32, from pages that hold whole chunks.
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
  }
}

// KV in one of the float types.
template <class T>
struct FloatScheme {
  static constexpr int size = T::size;
  static constexpr bool has_scales = false;
  static constexpr int scratch_size = 4;            // bytes of an element of a block in scratch
  static constexpr int widen_rows = size < 4 ? 2 * kMaxTile : 1 << 30;  // from here on, widening a block to f32 once pays

  static void widen_block(const Block& from, int num_slots, int dim, const Scratch& s) { widen<T>(from, num_slots, dim, s); }

  // One slot, at `offset` of a page's `head`, into a block in scratch.
  static void gather_slot(const KVPool& kv, const uint8_t* head, int offset, int slot, const Scratch& s) {
    const int dim = kv.padded_dim;
    const uint8_t* v = head + kv.v_offset + int64_t(offset) * dim * size;
    float* k = s.k + slot / kLanes * dim * kLanes + slot % kLanes;
    for (int d = 0; d < dim; ++d) k[d * kLanes] = T::element_k(head, k_index(kv, offset, d));
    for (int d = 0; d < dim; d += kLanes) store(s.v + slot * dim + d, T::load_v(v, d));
  }

  // Row r of a tile: q [head_dim] times scale, into [padded_dim][tile rows]. Null: zeros.
  static void pack_q(const KVPool& kv, const float* q, float scale, int r, int tile, float* packed) {
    for (int d = 0; d < kv.padded_dim; d += kLanes)
      scatter(packed + d * tile + r, tile, mul(load_first(q + d, q ? kv.head_dim - d : 0), set1(scale)));
  }

  template <int R>
  static void attend(bool in_scratch, const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s,
                     float* row_max, float* row_sum) {
    if (in_scratch) attend_tile<F32, R>(block, ahead, seen, q, dim, s, row_max, row_sum);
    else attend_tile<T, R>(block, ahead, seen, q, dim, s, row_max, row_sum);
  }
};

}  // namespace
}  // namespace ANB_ISA
}  // namespace anabranch
