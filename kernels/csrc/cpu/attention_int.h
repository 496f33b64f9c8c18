// Tiles over KV in 16 or 8 bit integers: exact sums, so that no order and no instruction set shows.
//
//     x[t] = k_scale[t] * (sum over dims of q[d] * k[t][d])                       q in 15 bits of its length
//     p[t] = 2^(q_scale * (x[t] - max))
//     w[t] = p[t] * v_scale[t] in steps of out_scale; 0 for slots that the row does not see
//     o[d] = out_scale * (sum over slots of w[t] * v[t][d])
//
// Both sums fit an int32. K (of 16 bits) and q are rounded to kLengthSteps of their Euclidean length, so no product of theirs exceeds its
// square. V has v_steps steps of its token's largest number, and a step of w is so large that no w exceeds kWeightSteps and their sum
// times v_steps fits.
#pragma once

#include "attention_tile.h"
#include "intlib.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

constexpr float kLengthSteps = 32767.0f;
constexpr float kWeightSteps = 32767.0f;

// Largest size in x [n]; NaN if any is NaN or infinite.
ANB_INLINE float largest_size(const float* x, int n) {
  vf high = zero(), fault = zero();
  for (int d = 0; d < n; d += kLanes) {
    const vf v = load_first(x + d, n - d);
    high = max(high, abs(v));
    fault = fma(v, zero(), fault);
  }
  return hmax(high) + hsum(fault);
}

ANB_INLINE float length_of(const float* x, int n) {
  vf squares = zero();
  for (int d = 0; d < n; d += kLanes) {
    const vf v = load_first(x + d, n - d);
    squares = fma(v, v, squares);
  }
  return sqrtf(hsum(squares));
}

struct I16 {
  using Widened = I16;
  static constexpr int size = 2;
  static constexpr float k_steps = kLengthSteps, v_steps = 8191.0f;
  static float k_scale(const float* k, int n) { return length_of(k, n) / k_steps; }
  ANB_INLINE vi load_pairs(const uint8_t* p) { return i_load(p); }
};
struct I8InWords {
  static constexpr int size = 2;
  static constexpr float v_steps = 127.0f;
  ANB_INLINE vi load_pairs(const uint8_t* p) { return i_load(p); }
};
struct I8 {
  using Widened = I8InWords;
  static constexpr int size = 1;
  static constexpr float k_steps = 127.0f, v_steps = 127.0f;
  static float k_scale(const float* k, int n) { return largest_size(k, n) / k_steps; }
  ANB_INLINE vi load_pairs(const uint8_t* p) { return i_load_signed_bytes(p); }
};

constexpr int kPairBytes = 4 * kLanes;  // of 16 pairs of words

// ---- Queries: a tile is [pairs of dims][tile rows], then a scale per row ----

ANB_INLINE void pack_q_int(const KVPool& kv, const float* q, float scale, int r, int tile, float* packed) {
  const int dim = kv.padded_dim, n = q ? kv.head_dim : 0;
  vf squares = zero();
  for (int d = 0; d < n; d += kLanes) {
    const vf x = mul(load_first(q + d, n - d), set1(scale));
    squares = fma(x, x, squares);
  }
  const float length = sqrtf(hsum(squares));  // NaN or infinite where q is not finite
  const vf inverse = set1(length > 0.0f ? kLengthSteps / length : 0.0f);
  int32_t* pairs = (int32_t*)packed + r;
  for (int d = 0; d < dim; d += 2 * kLanes) {
    int32_t x[kLanes];
    const auto rounded = [&](int from) { return round_to_int(mul(mul(load_first(q + from, n - from), set1(scale)), inverse)); };
    store_words((int16_t*)x, rounded(d), d + kLanes < dim ? rounded(d + kLanes) : i_zero());
    for (int i = 0; i < kLanes && d + 2 * i < dim; ++i, pairs += tile) *pairs = x[i];
  }
  packed[dim / 2 * tile + r] = length / kLengthSteps;
}

// ---- Scores ----

// x of R rows against C chunks.
template <class T, int R, int C>
ANB_INLINE void score_chunks_int(const Block& block, const Block& ahead, int chunk, const int32_t* q, int dim, float* scores) {
  vi sum[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int c = 0; c < C; ++c) sum[r][c] = i_zero();
  const uint8_t *k[C], *next[C];
#pragma GCC unroll 12
  for (int c = 0; c < C; ++c) k[c] = block.k[chunk + c], next[c] = ahead.k[chunk + c];
  const int32_t* end = q + dim / 2 * R;
#pragma GCC unroll 1  // unrolled, GCC 12 shuffles the accumulators between registers
  for (int at = 0; q < end; q += R, at += kLanes * 2 * T::size) {
    vi x[C];
#pragma GCC unroll 12
    for (int c = 0; c < C; ++c) x[c] = T::load_pairs(k[c] + at);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const vi y = i_set1(q[r]);
#pragma GCC unroll 12
      for (int c = 0; c < C; ++c) sum[r][c] = dot2(sum[r][c], x[c], y);
    }
    if (R <= kPrefetchRows)
#pragma GCC unroll 12
      for (int c = 0; c < C; ++c) prefetch(next[c] + at);
  }
  vf k_scale[C];
#pragma GCC unroll 12
  for (int c = 0; c < C; ++c) k_scale[c] = load(block.k_scale[chunk + c]);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int c = 0; c < C; ++c) store(scores + r * kBlock + (chunk + c) * kLanes, mul(to_float(sum[r][c]), k_scale[c]));
}

template <class T, int R>
__attribute__((noinline)) void score_tile_int(const Block& block, const Block& ahead, int first, int last, const float* q, int dim, float* scores) {
  constexpr int C = kAccumulators / R >= 8 ? 8 : kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int c = first;
  for (; c + C <= last; c += C) score_chunks_int<T, R, C>(block, ahead, c, (const int32_t*)q, dim, scores);
  for (; c < last; ++c) score_chunks_int<T, R, 1>(block, ahead, c, (const int32_t*)q, dim, scores);
}

// ---- Weights ----

// Largest V scale that a query row sees; NaN if it sees one.
ANB_INLINE float highest_v_scale(const Block& block, const Seen& seen) {
  vf high = zero();
  for (int c = first_chunk_of(seen); c < last_chunk_of(seen); ++c) {
    const vf scale = load(block.v_scale[c]);
    high = max_sticky(high, seen.sees_all(c) ? scale : select(seen.mask(c), scale, zero()));
  }
  return hmax_sticky(high);
}

// Scores -> p * v_scale in place, in chunks [first, last) of the tile; 0 where the row does not see. Returns the sum of p.
template <bool kWhole>
ANB_INLINE float weigh_int(const Block& block, const Seen& seen, int first, int last, float q_scale, float top, float* scores) {
  const int mine = kWhole ? 0 : first_chunk_of(seen), mine_end = kWhole ? kChunks : last_chunk_of(seen);
  const vf factor = set1(q_scale), shift = set1(-top);
  vf sum[2] = {zero(), zero()};  // of even and odd chunks: shorter chains
  for (int c = kWhole ? 0 : first; c < (kWhole ? kChunks : last); ++c) {
    vf w = zero();
    if (kWhole || (mine <= c && c < mine_end)) {
      vf p = exp2_weight(fma(load(scores + c * kLanes), factor, shift));
      w = mul(p, load(block.v_scale[c]));
      if (!kWhole && !seen.sees_all(c)) p = select(seen.mask(c), p, zero()), w = select(seen.mask(c), w, zero());
      sum[c & 1] = add(sum[c & 1], p);
    }
    store(scores + c * kLanes, w);
  }
  return hsum(add(sum[0], sum[1]));
}

// Scores of R rows -> weights in chunks [first, last), which are even; each row's max, sum and out_scale. Rows with a sum of -1 see nothing.
template <class T, bool kWhole, int R>
ANB_INLINE void weigh_tile_int(const Block& block, const Seen* seen, int first, int last, const float* q_scale, float* scores, int16_t* weights,
                               float* row_max, float* row_sum, float* out_scale) {
  float v_scale[kLanes] = {};
  for (int r = 0; r < R; ++r)
    if (kWhole || row_sum[r] == 0.0f) {
      row_max[r] = q_scale[r] * hmax(kWhole ? highest_of_block(scores + r * kBlock) : highest_seen(seen[r], scores + r * kBlock));
      v_scale[r] = kWhole && r > 0 ? v_scale[0] : highest_v_scale(block, seen[r]);
    }
  for (int r = 0; r < R; ++r)
    if (kWhole || row_sum[r] == 0.0f) row_sum[r] = weigh_int<kWhole>(block, seen[r], first, last, q_scale[r], row_max[r], scores + r * kBlock);
  constexpr float kMostSum = 2147483647.0f / T::v_steps - kBlock;  // every weight may be rounded up
  const vf largest = load(v_scale), steps = min(set1(kWeightSteps), div(set1(kMostSum), load(row_sum)));
  float inverse[kLanes];
  store(inverse, select(is_less(zero(), largest), div(steps, largest), zero()));
  store(out_scale, div(largest, steps));
  for (int r = 0; r < R; ++r)
    for (int t = r * kBlock + first * kLanes; t < r * kBlock + last * kLanes; t += 2 * kLanes)
      store_words(weights + t, round_to_int(mul(load(scores + t), set1(inverse[r]))), round_to_int(mul(load(scores + t + kLanes), set1(inverse[r]))));
}

// ---- Weighted sums ----

// out[r][z] = out_scale[r] * sum of w[r][t] * v[t][z] over chunks [first, last), Z vectors of dims from `dim0` on.
template <class T, int R, int Z>
ANB_INLINE void accumulate_int(const Block& block, const Block& ahead, int first, int last, const int16_t* weights, const float* out_scale, int dim,
                               int dim0, float* out) {
  vi sum[R][Z];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int z = 0; z < Z; ++z) sum[r][z] = i_zero();
  for (int c = first; c < last; ++c) {
    const int16_t* w = weights + c * kLanes;
    const uint8_t *v = block.v[c] + dim0 * 2 * T::size, *next = ahead.v[c] + dim0 * 2 * T::size;
#pragma GCC unroll 1
    for (int t = 0; t < kLanes; t += 2, w += 2, v += dim * 2 * T::size, next += dim * 2 * T::size) {
      vi x[Z];
#pragma GCC unroll 12
      for (int z = 0; z < Z; ++z) x[z] = T::load_pairs(v + z * kLanes * 2 * T::size);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        int32_t two;
        memcpy(&two, w + r * kBlock, 4);
        const vi y = i_set1(two);
#pragma GCC unroll 12
        for (int z = 0; z < Z; ++z) sum[r][z] = dot2(sum[r][z], x[z], y);
      }
      if (R <= kPrefetchRows)
#pragma GCC unroll 12
        for (int z = 0; z < Z; ++z) prefetch(next + z * kLanes * 2 * T::size);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
    for (int z = 0; z < Z; ++z) store(out + r * dim + dim0 + z * kLanes, mul(to_float(sum[r][z]), set1(out_scale[r])));
}

template <class T, int R>
__attribute__((noinline)) void accumulate_tile_int(const Block& block, const Block& ahead, int first, int last, const int16_t* weights,
                                                   const float* out_scale, int dim, float* out) {
  constexpr int Z = kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int d = 0;
  for (; d + Z * kLanes <= dim; d += Z * kLanes) accumulate_int<T, R, Z>(block, ahead, first, last, weights, out_scale, dim, d, out);
  for (; d < dim; d += kLanes) accumulate_int<T, R, 1>(block, ahead, first, last, weights, out_scale, dim, d, out);
}

// R query rows against one block: max[r], sum[r] (-1: sees nothing), out[r][dim].
template <class T, int R>
void attend_tile_int(const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s, float* row_max,
                     float* row_sum) {
  const TileView view = view_tile<R>(seen, row_sum);
  if (view.lo >= view.hi) return;
  const int first = view.lo / kLanes, last = (view.hi + kLanes - 1) / kLanes;
  const float* q_scale = q + dim / 2 * R;
  float out_scale[kLanes];
  score_tile_int<T, R>(block, ahead, first, last, q, dim, s.scores);
  if (view.is_whole) weigh_tile_int<T, true, R>(block, seen, 0, kChunks, q_scale, s.scores, s.weights, row_max, row_sum, out_scale);
  else weigh_tile_int<T, false, R>(block, seen, first & ~1, (last + 1) & ~1, q_scale, s.scores, s.weights, row_max, row_sum, out_scale);
  accumulate_tile_int<T, R>(block, ahead, first, last, s.weights, out_scale, dim, s.tile_out);
}

// ---- Blocks as these tiles want them ----

// KV in one of the integer types.
template <class T>
struct IntScheme {
  static constexpr int size = T::size;
  static constexpr bool has_scales = true;
  static constexpr int scratch_size = 2;                                // bytes of an element of a block in scratch
  static constexpr int widen_rows = size < 2 ? 2 * kMaxTile : 1 << 30;  // from here on, widening a block to words once pays

  static void widen_block(const Block& from, int num_slots, int dim, const Scratch& s) {
    const int chunk_bytes = dim * kLanes * 2;
    for (int c = 0; c * kLanes < num_slots; ++c) {
      uint8_t *k = (uint8_t*)s.k + c * chunk_bytes, *v = (uint8_t*)s.v + c * chunk_bytes;
      for (int at = 0; at < chunk_bytes; at += kPairBytes) {
        i_store(k + at, T::load_pairs(from.k[c] + at / 2 * size));
        i_store(v + at, T::load_pairs(from.v[c] + at / 2 * size));
      }
      store(s.k_scale + c * kLanes, load(from.k_scale[c]));
      store(s.v_scale + c * kLanes, load(from.v_scale[c]));
    }
  }

  static void gather_slot(const KVPool& kv, const uint8_t* head, int offset, int slot, const Scratch& s) {
    const int dim = kv.padded_dim, chunk = slot / kLanes, lane = slot % kLanes;
    int16_t *k = (int16_t*)s.k + chunk * dim * kLanes + lane * 2, *v = (int16_t*)s.v + chunk * dim * kLanes + lane / 2 * dim * 2 + lane % 2;
    const auto element = [](const uint8_t* p, int64_t i) { return size == 1 ? int16_t(int8_t(p[i])) : ((const int16_t*)p)[i]; };
    for (int d = 0; d < dim; ++d) {
      k[d / 2 * 2 * kLanes + d % 2] = element(head, k_index(kv, offset, d));
      v[d * 2] = element(head + kv.v_offset, v_index(kv, offset, d));
    }
    const float* scales = (const float*)(head + kv.scale_offset);
    s.k_scale[slot] = scales[offset];
    s.v_scale[slot] = scales[kv.page_size + offset];
  }

  static void pack_q(const KVPool& kv, const float* q, float scale, int r, int tile, float* packed) { pack_q_int(kv, q, scale, r, tile, packed); }

  template <int R>
  static void attend(bool in_scratch, const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s,
                     float* row_max, float* row_sum) {
    if (in_scratch) attend_tile_int<typename T::Widened, R>(block, ahead, seen, q, dim, s, row_max, row_sum);
    else attend_tile_int<T, R>(block, ahead, seen, q, dim, s, row_max, row_sum);
  }
};

}  // namespace
}  // namespace ANB_ISA
}  // namespace anabranch
