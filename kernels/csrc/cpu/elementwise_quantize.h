// Rounding activations to groups of 32 signed bytes with a scale each: one group at a time, and four at once where AVX-512 allows it.
#pragma once

#include "elementwise.h"
#include "intlib.h"

namespace anabranch {
namespace ANB_ISA {

constexpr float kLargestFloat = 3.4028235e38f;
constexpr float kSmallestNormal = 1.1754944e-38f;  // of a scale: below it 1 / scale may overflow, and all is nought anyway

// What a record knows beside its codes, from the sums of its halves.
ANB_INLINE void put_sums(ActivationGroup* out, float scale, int32_t sum0, int32_t sum1) {
  out->scale = scale;
  out->weighted_sum = scale * float(sum0 + sum1);
  out->offset = kBiasBits - 128 * (sum0 + sum1);
  out->half_offset[0] = kBiasBits - 128 * sum0;
  out->half_offset[1] = kBiasBits - 128 * sum1;
}

// The largest magnitude is found on bits: as integers, NaN > infinity > every number, and none is passed over.
ANB_INLINE void quantize_group(vf x0, vf x1, ActivationGroup* out) {
  const vi no_sign = i_set1(0x7fffffff);
  const float largest = bits_to_float(uint32_t(i_hmax(i_max(i_and(bits_of(x0), no_sign), i_and(bits_of(x1), no_sign)))));
  float scale = largest * (1.0f / 127.0f);
  const bool is_finite = largest <= kLargestFloat;
  if (!is_finite) scale = bits_to_float(0x7fc00000u);
  const float inverse = scale >= kSmallestNormal ? 1.0f / scale : 0.0f;
  const vi c0 = is_finite ? round_to_int(mul(x0, set1(inverse))) : i_zero(), c1 = is_finite ? round_to_int(mul(x1, set1(inverse))) : i_zero();
  int32_t sum0, sum1;
  store_bytes(out->codes, c0, c1, &sum0, &sum1);
  put_sums(out, scale, sum0, sum1);
}

#if defined(__AVX512F__)

static __attribute__((noinline)) void quantize_slowly(const float* x, ActivationGroup* out) { quantize_group(load(x), load(x + kLanes), out); }

// Lane j of every 128 bits: the largest lane of m[j] as integers.
ANB_INLINE __m512i max_of_four(const __m512i (&m)[4]) {
  const __m512i m01 = _mm512_max_epi32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
  const __m512i m23 = _mm512_max_epi32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
  __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(m01, m23), _mm512_unpackhi_epi64(m01, m23));
  all = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0x4e));
  return _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
}

// Numbers in [-128, 127] of two groups to 2 x 32 bytes.
ANB_INLINE __m512i bytes_of_two(__m512i a0, __m512i a1, __m512i b0, __m512i b1) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // packs work within 128 bits
  return _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(_mm512_packs_epi32(a0, a1), _mm512_packs_epi32(b0, b1)));
}

// put_sums of four groups.
ANB_INLINE void put_four_sums(__m128 scale, __m128i sum0, __m128i sum1, ActivationGroup* out, size_t out_step) {
  const __m128i bias = _mm_set1_epi32(kBiasBits), sum = _mm_add_epi32(sum0, sum1);
  const __m128 weighted = _mm_mul_ps(scale, _mm_cvtepi32_ps(sum));
  const __m128i offset = _mm_sub_epi32(bias, _mm_slli_epi32(sum, 7)), half0 = _mm_sub_epi32(bias, _mm_slli_epi32(sum0, 7));
  const __m512i half1 = _mm512_castsi128_si512(_mm_sub_epi32(bias, _mm_slli_epi32(sum1, 7)));
  const __m512i others = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(_mm_castps_si128(weighted), _mm_castps_si128(scale))),
                                            _mm256_set_m128i(half0, offset), 1);
  const __m512i of_ab = _mm512_setr_epi32(0, 4, 8, 12, 16, 0, 0, 0, 1, 5, 9, 13, 17, 0, 0, 0);
  const __m512i of_cd = _mm512_setr_epi32(2, 6, 10, 14, 18, 0, 0, 0, 3, 7, 11, 15, 19, 0, 0, 0);
  const __m512i ab = _mm512_permutex2var_epi32(others, of_ab, half1), cd = _mm512_permutex2var_epi32(others, of_cd, half1);
  _mm256_storeu_si256((__m256i*)&out[0].scale, _mm512_castsi512_si256(ab));
  _mm256_storeu_si256((__m256i*)&out[out_step].scale, _mm512_extracti64x4_epi64(ab, 1));
  _mm256_storeu_si256((__m256i*)&out[2 * out_step].scale, _mm512_castsi512_si256(cd));
  _mm256_storeu_si256((__m256i*)&out[3 * out_step].scale, _mm512_extracti64x4_epi64(cd, 1));
}
static_assert(offsetof(ActivationGroup, scale) == 32 && offsetof(ActivationGroup, half_offset) == 44);  // the order in which they are stored

// quantize_group of four groups, the same bits: the steps that work across lanes, and the division, are shared.
ANB_INLINE void quantize_four(const float* x, size_t step, ActivationGroup* out, size_t out_step) {
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  __m512i magnitude[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    magnitude[j] = _mm512_max_epi32(_mm512_and_si512(bits_of(load(x + j * step)).v, no_sign),
                                    _mm512_and_si512(bits_of(load(x + j * step + kLanes)).v, no_sign));
  }
  const __m128 largest = _mm_castsi128_ps(_mm512_castsi512_si128(max_of_four(magnitude)));
  if (_mm_movemask_ps(_mm_cmple_ps(largest, _mm_set1_ps(kLargestFloat))) != 15) {
    for (int j = 0; j < 4; ++j) quantize_slowly(x + j * step, out + j * out_step);
    return;
  }
  const __m128 scale = _mm_mul_ps(largest, _mm_set1_ps(1.0f / 127.0f));
  const __m128 is_normal = _mm_cmpge_ps(scale, _mm_set1_ps(kSmallestNormal));
  const __m512 inverse = _mm512_broadcast_f32x4(_mm_and_ps(is_normal, _mm_div_ps(_mm_set1_ps(1.0f), scale)));
  const vf of_group[4] = {{_mm512_permute_ps(inverse, 0x00)}, {_mm512_permute_ps(inverse, 0x55)}, {_mm512_permute_ps(inverse, 0xaa)},
                          {_mm512_permute_ps(inverse, 0xff)}};
  __m512i codes[4][2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    codes[j][0] = round_to_int(mul(load(x + j * step), of_group[j])).v;
    codes[j][1] = round_to_int(mul(load(x + j * step + kLanes), of_group[j])).v;
  }
  const __m512i ab = bytes_of_two(codes[0][0], codes[0][1], codes[1][0], codes[1][1]);
  const __m512i cd = bytes_of_two(codes[2][0], codes[2][1], codes[3][0], codes[3][1]);
  _mm256_storeu_si256((__m256i*)out[0].codes, _mm512_castsi512_si256(ab));
  _mm256_storeu_si256((__m256i*)out[out_step].codes, _mm512_extracti64x4_epi64(ab, 1));
  _mm256_storeu_si256((__m256i*)out[2 * out_step].codes, _mm512_castsi512_si256(cd));
  _mm256_storeu_si256((__m256i*)out[3 * out_step].codes, _mm512_extracti64x4_epi64(cd, 1));
  // Sums of four codes in each lane; those of a half lie in 128 bits.
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, ab), t = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, cd);
  const __m512i pairs = _mm512_add_epi32(_mm512_unpacklo_epi32(s, t), _mm512_unpackhi_epi32(s, t));
  const __m512i halves = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_ENUM(0x4e)));  // lanes 0, 4: of a; 8, 12: b; 1, 5: c; 9, 13: d
  const __m256i in_order = _mm512_castsi512_si256(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 0, 0, 0, 0, 0, 0, 0, 0), halves));
  put_four_sums(scale, _mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1), out, out_step);
}

#endif

// n groups of 32 numbers, `step` floats apart, to records `out_step` apart.
ANB_INLINE void quantize_groups(const float* x, size_t step, int n, ActivationGroup* out, size_t out_step) {
#if defined(__AVX512F__)
  if (n >= 4) {
    for (; n >= 4; n -= 4, x += 4 * step, out += 4 * out_step) quantize_four(x, step, out, out_step);
    if (n > 1) return quantize_four(x - (4 - n) * step, step, out - (4 - n) * out_step, out_step);  // some again, which is faster than some alone
  }
#endif
  for (; n > 0; --n, x += step, out += out_step) quantize_group(load(x), load(x + kLanes), out);
}

}  // namespace ANB_ISA
}  // namespace anabranch
