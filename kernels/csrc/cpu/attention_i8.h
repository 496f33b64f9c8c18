// Tiles over int8 KV, in integers: exact sums, so that no order and no instruction set shows.
//
//     s[t] = q_scale * k_scale[t] * (sum over dims of q[d] * k[t][d])         q in 15 bits of its largest
//     p[t] = 2^(s[t] - max), w[t] = p[t] * v_scale[t] in 16 bits of the row's largest in the block (0 for slots it does not see)
//     o[d] = w_scale * (sum over slots of w[t] * v[t][d])
//
// Both sums fit an int32. AVX-512 VNNI multiplies unsigned by signed bytes: q and w go in as two digits each, the sum of the high digits is
// shifted before the low ones are added, and K is stored + 128, which a correction of 128 * (sum of q) takes back.
#pragma once

#include "attention_tile.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

constexpr float kQSteps = 127 * 128;      // q = 128 * high + low, -64 <= low < 64
constexpr float kWeightSteps = 65535;     // w = 256 * high + low

// ---- Queries: a tile is [words of q][tile rows], then a correction and a scale per row ----

#if defined(__AVX512F__)
ANB_INLINE int q_digit_words(int dim) { return dim / 2; }  // high digits [dim / 4] of four dims each, then low
#else
ANB_INLINE int q_digit_words(int dim) { return dim; }      // q itself
#endif

ANB_INLINE void pack_q_i8(const KVPool& kv, const float* q, float scale, int r, int tile, float* packed) {
  const int dim = kv.padded_dim, n = q ? kv.head_dim : 0;
  vf high = zero(), fault = zero();
  for (int d = 0; d < n; d += kLanes) {
    const vf x = mul(load_first(q + d, n - d), set1(scale));
    high = max(high, abs(x));
    fault = fma(x, zero(), fault);
  }
  const float top = hmax(high) + hsum(fault);  // NaN where q is not finite
  const vf inverse = set1(top > 0.0f ? kQSteps / top : 0.0f), least = set1(-kQSteps), most = set1(kQSteps);
  int32_t* words = (int32_t*)packed;
#if defined(__AVX512F__)
  __m512i total = _mm512_setzero_si512();
#endif
  for (int d = 0; d < dim; d += kLanes) {
    int32_t x[kLanes];
    store_ints(x, min(most, max(least, mul(mul(load_first(q + d, n - d), set1(scale)), inverse))));
#if defined(__AVX512F__)
    const __m512i all = _mm512_loadu_si512(x), high_digits = _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(64)), 7);
    total = _mm512_add_epi32(total, all);
    int32_t digits[2][4];
    _mm_storeu_si128((__m128i*)digits[0], _mm512_cvtepi32_epi8(high_digits));
    _mm_storeu_si128((__m128i*)digits[1], _mm512_cvtepi32_epi8(_mm512_sub_epi32(all, _mm512_slli_epi32(high_digits, 7))));
    for (int pass = 0; pass < 2; ++pass)
      for (int i = 0; i < 4; ++i) words[(pass * dim / 4 + d / 4 + i) * tile + r] = digits[pass][i];
#else
    for (int i = 0; i < kLanes; ++i) words[(d + i) * tile + r] = x[i];
#endif
  }
#if defined(__AVX512F__)
  words[q_digit_words(dim) * tile + r] = 128 * _mm512_reduce_add_epi32(total);
#endif
  packed[(q_digit_words(dim) + 1) * tile + r] = top / kQSteps;
}

// ---- Scores ----

template <int R, int C>
ANB_INLINE void score_chunks_i8(const Block& block, const Block& ahead, int chunk, const float* q, int dim, float* scores) {
  const int32_t* words = (const int32_t*)q;
  const int32_t* corrections = words + q_digit_words(dim) * R;
  const float* q_scales = q + (q_digit_words(dim) + 1) * R;
  const uint8_t* k[C];
  for (int c = 0; c < C; ++c) k[c] = block.k[chunk + c];
#if defined(__AVX512F__)
  (void)corrections;
  __m512i sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_si512();
  for (int pass = 0; pass < 2; ++pass) {
    for (int d = 0; d < dim; d += 4, words += R) {
      __m512i x[C];
      for (int c = 0; c < C; ++c) x[c] = _mm512_loadu_si512(k[c] + d * kLanes);
      for (int r = 0; r < R; ++r) {
        const __m512i y = _mm512_set1_epi32(words[r]);
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbusd_epi32(sum[r][c], x[c], y);
      }
      if (R <= kPrefetchRows && pass == 0)
        for (int c = 0; c < C; ++c) prefetch(ahead.k[chunk + c] + d * kLanes);
    }
    if (pass == 0)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_slli_epi32(sum[r][c], 7);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      const vf total = {_mm512_cvtepi32_ps(_mm512_sub_epi32(sum[r][c], _mm512_set1_epi32(corrections[r])))};
      store(scores + r * kBlock + (chunk + c) * kLanes, mul(mul(total, set1(q_scales[r])), load(block.k_scale[chunk + c])));
    }
#else
  (void)corrections, (void)ahead;
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      int32_t sum[kLanes] = {};
      for (int d = 0; d < dim; d += 4) {
        const uint8_t* x = k[c] + d * kLanes;
        const int32_t y0 = words[d * R + r], y1 = words[(d + 1) * R + r], y2 = words[(d + 2) * R + r], y3 = words[(d + 3) * R + r];
        for (int i = 0; i < kLanes; ++i)
          sum[i] += (x[4 * i] - 128) * y0 + (x[4 * i + 1] - 128) * y1 + (x[4 * i + 2] - 128) * y2 + (x[4 * i + 3] - 128) * y3;
      }
      store(scores + r * kBlock + (chunk + c) * kLanes, mul(mul(load_ints(sum), set1(q_scales[r])), load(block.k_scale[chunk + c])));
    }
#endif
}

template <int R>
__attribute__((noinline)) void score_tile_i8(const Block& block, const Block& ahead, int first_chunk, int last_chunk, const float* q, int dim, float* scores) {
  constexpr int C = kAccumulators / R >= 8 ? 8 : kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int c = first_chunk;
  for (; c + C <= last_chunk; c += C) score_chunks_i8<R, C>(block, ahead, c, q, dim, scores);
  for (; c < last_chunk; ++c) score_chunks_i8<R, 1>(block, ahead, c, q, dim, scores);
}

// ---- Weights ----

constexpr float kLeastWeight = 1e-30f;    // a row whose largest weight in a block is below it gets 0 from there

// A chunk of a row's weights as digits: for every four slots, four high bytes, then four low ones.
ANB_INLINE void store_digits(vf weights, uint8_t* digits, int chunk) {
#if defined(__AVX512F__)
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(weights.v));
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  _mm256_storeu_si256((__m256i*)(digits + chunk * 2 * kLanes), _mm256_shuffle_epi8(words, order));
#else
  int32_t w[kLanes];
  store_ints(w, weights);
  for (int i = 0; i < kLanes; ++i) {
    uint8_t* four = digits + chunk * 2 * kLanes + i / 4 * 8 + i % 4;
    four[0] = uint8_t(w[i] >> 8);
    four[4] = uint8_t(w[i]);
  }
#endif
}

// Scores -> digits of weights in chunks [first, last) of the tile; those that the row does not see get 0. Returns the sum of 2^(score - top) and,
// in `scale`, what one step of the digits is worth.
template <bool kWhole>
ANB_INLINE float weigh_i8(const Block& block, const Seen& seen, int first, int last, float top, float* scores, uint8_t* digits, float* scale) {
  const int mine = kWhole ? 0 : first_chunk_of(seen), mine_end = kWhole ? kChunks : last_chunk_of(seen);
  const vf shift = set1(top);
  vf sum = zero(), high = zero();
  for (int c = mine; c < mine_end; ++c) {
    const vf p = exp2(sub(load(scores + c * kLanes), shift));
    vf w = mul(p, load(block.v_scale[c]));
    if (!kWhole && !seen.sees_all(c)) w = select(seen.mask(c), w, zero());
    sum = add(sum, p);
    high = max_sticky(high, w);
    store(scores + c * kLanes, w);
  }
  const float largest = hmax_sticky(high);
  const vf inverse = set1(largest > kLeastWeight ? kWeightSteps / largest : 0.0f);
  if (kWhole) {
    for (int c = 0; c < kChunks; ++c) store_digits(mul(load(scores + c * kLanes), inverse), digits, c);
  } else {
    for (int c = first; c < last; ++c) store_digits(mine <= c && c < mine_end ? mul(load(scores + c * kLanes), inverse) : zero(), digits, c);
  }
  *scale = largest < kInfinity ? largest / kWeightSteps : __builtin_nanf("");
  return hsum(sum);
}

// ---- Weighted sums ----

// out[r][z] = scale[r] * sum of w[r][t] * v[t][z] over chunks [first, last), Z vectors of dims from `dim0` on.
template <int R, int Z>
__attribute__((noinline)) void accumulate_i8(const Block& block, const Block& ahead, int first, int last, const uint8_t* digits, const float* scale, int dim,
                              int dim0, float* out) {
#if defined(__AVX512F__)
  __m512i sum[R][Z];
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) sum[r][z] = _mm512_setzero_si512();
  for (int pass = 0; pass < 2; ++pass) {
    for (int c = first; c < last; ++c)
#pragma GCC unroll 1  // unrolled, GCC 12 shuffles the accumulators between registers
      for (int group = 0; group < 4; ++group) {
        const int64_t offset = (group * dim + dim0) * 4;
        const uint8_t* w = digits + c * 2 * kLanes + group * 8 + pass * 4;
        __m512i x[Z];
        for (int z = 0; z < Z; ++z) x[z] = _mm512_loadu_si512(block.v[c] + offset + z * 64);
        for (int r = 0; r < R; ++r) {
          int32_t four;
          memcpy(&four, w + r * 2 * kBlock, 4);
          const __m512i y = _mm512_set1_epi32(four);
          for (int z = 0; z < Z; ++z) sum[r][z] = _mm512_dpbusd_epi32(sum[r][z], y, x[z]);
        }
        if (R <= kPrefetchRows && pass == 0)
          for (int z = 0; z < Z; ++z) prefetch(ahead.v[c] + offset + z * 64);
      }
    if (pass == 0)
      for (int r = 0; r < R; ++r)
        for (int z = 0; z < Z; ++z) sum[r][z] = _mm512_slli_epi32(sum[r][z], 8);
  }
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) store(out + r * dim + dim0 + z * kLanes, mul({_mm512_cvtepi32_ps(sum[r][z])}, set1(scale[r])));
#else
  (void)ahead;
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) {
      int32_t sum[kLanes] = {};
      for (int t = first * kLanes; t < last * kLanes; t += 4) {
        const int8_t* x = (const int8_t*)block.v[t / kLanes] + (t % kLanes * dim + (dim0 + z * kLanes) * 4);
        const uint8_t* w = digits + r * 2 * kBlock + t * 2;
        int32_t y[4];
        for (int j = 0; j < 4; ++j) y[j] = w[j] * 256 + w[4 + j];
        for (int i = 0; i < kLanes; ++i) sum[i] += x[4 * i] * y[0] + x[4 * i + 1] * y[1] + x[4 * i + 2] * y[2] + x[4 * i + 3] * y[3];
      }
      store(out + r * dim + dim0 + z * kLanes, mul(load_ints(sum), set1(scale[r])));
    }
#endif
}

// R query rows against one block: max[r], sum[r] (-1: sees nothing), out[r][dim].
template <int R>
void attend_tile_i8(const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s, float* row_max, float* row_sum) {
  const TileView view = view_tile<R>(seen, row_sum);
  if (view.lo >= view.hi) return;
  const int first = view.lo / kLanes, last = (view.hi + kLanes - 1) / kLanes;
  float* scores = s.scores;
  score_tile_i8<R>(block, ahead, first, last, q, dim, scores);
  float scale[R] = {};
  for (int r = 0; r < R; ++r)
    if (row_sum[r] == 0.0f) row_max[r] = hmax(view.is_whole ? highest_of_block(scores + r * kBlock) : highest_seen(seen[r], scores + r * kBlock));
  for (int r = 0; r < R; ++r) {
    if (row_sum[r] != 0.0f) continue;
    uint8_t* digits = s.digits + r * 2 * kBlock;
    if (view.is_whole) row_sum[r] = weigh_i8<true>(block, seen[r], first, last, row_max[r], scores + r * kBlock, digits, scale + r);
    else row_sum[r] = weigh_i8<false>(block, seen[r], first, last, row_max[r], scores + r * kBlock, digits, scale + r);
  }
  constexpr int Z = kAccumulators / R >= 4 ? 4 : kAccumulators / R >= 2 ? 2 : 1;
  int d = 0;
  for (; d + Z * kLanes <= dim; d += Z * kLanes) accumulate_i8<R, Z>(block, ahead, first, last, s.digits, scale, dim, d, s.tile_out);
  for (; d < dim; d += kLanes) accumulate_i8<R, 1>(block, ahead, first, last, s.digits, scale, dim, d, s.tile_out);
}

struct I8Scheme {
  static constexpr int size = 1, scratch_size = 1;
  static constexpr int widen_rows = 1 << 30;  // never: bytes are what the tiles want

  static void widen_block(const Block&, int, int, const Scratch&) {}

  static void gather_slot(const KVPool& kv, const uint8_t* head, int offset, int slot, const Scratch& s) {
    const int dim = kv.padded_dim, chunk = slot / kLanes, lane = slot % kLanes;
    uint8_t *k = (uint8_t*)s.k + chunk * dim * kLanes + lane * 4, *v = (uint8_t*)s.v + chunk * dim * kLanes + lane / 4 * dim * 4 + lane % 4;
    for (int d = 0; d < dim; ++d) {
      k[d / 4 * 4 * kLanes + d % 4] = head[k_index(kv, offset, d)];
      v[d * 4] = head[kv.v_offset + v_index(kv, offset, d)];
    }
    const float* scales = (const float*)(head + kv.scale_offset);
    s.k_scale[slot] = scales[offset];
    s.v_scale[slot] = scales[kv.page_size + offset];
  }

  static void pack_q(const KVPool& kv, const float* q, float scale, int r, int tile, float* packed) { pack_q_i8(kv, q, scale, r, tile, packed); }

  template <int R>
  static void attend(bool, const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim, const Scratch& s, float* row_max,
                     float* row_sum) {
    attend_tile_i8<R>(block, ahead, seen, q, dim, s, row_max, row_sum);
  }
};

}  // namespace
}  // namespace ANB_ISA
}  // namespace anabranch
