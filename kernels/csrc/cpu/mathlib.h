// Sixteen floats at a time, the same source for every instruction set: `vf` is one AVX-512 register, two AVX2 ones, or an array.
//
// Included by files that are compiled once per instruction set; everything here has internal linkage in a namespace named after it, so
// that the linker never mixes variants. Each operation is one rounding where the set has FMA; lanes never influence one another, except in
// hmax and hsum, whose order is fixed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common.h"

#if defined(__AVX512F__)
#define ANB_ISA avx512
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ANB_ISA avx2
#include <immintrin.h>
#else
#define ANB_ISA plain
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms inside GCC 12's own AVX-512 intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define ANB_INLINE static inline __attribute__((always_inline))

namespace anabranch {
namespace ANB_ISA {

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

// 2^f = 1 + f * polynomial, |f| <= 1/2, relative error 9e-8 (least-squares minimax, fitted with the constant fixed at 1).
constexpr float kExp2[] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
// The same in fewer terms: 2^f = polynomial, relative error 2.7e-6 (minimax).
constexpr float kExp2Weight[] = {0x1.ffffe8p-1f, 0x1.62e0dcp-1f, 0x1.ec06dap-3f, 0x1.ca1442p-5f, 0x1.3997d6p-7f};
constexpr float kMinWeight = -96.0f;   // nothing beside 1, and what it is multiplied with does not become denormal
constexpr float kMinExp2 = -126.0f;  // below it 2^x is flushed to zero: denormals would be slow
constexpr float kLog2e = 0x1.715476p+0f;

ANB_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into L2; any address will do
ANB_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }
ANB_INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// Round to nearest even; NaN stays NaN.
ANB_INLINE uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr bool kHasFma = true;
struct vf {
  __m512 v;
};
ANB_INLINE vf zero() { return {_mm512_setzero_ps()}; }
ANB_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
ANB_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
ANB_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
ANB_INLINE vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
ANB_INLINE vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
ANB_INLINE vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
ANB_INLINE vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
ANB_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ANB_INLINE vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
ANB_INLINE vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
ANB_INLINE vf max_sticky(vf a, vf b) {  // of numbers that are not negative; NaN wins
  return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
ANB_INLINE vf select(uint32_t mask, vf yes, vf no) { return {_mm512_mask_blend_ps(__mmask16(mask), no.v, yes.v)}; }
ANB_INLINE uint32_t is_less(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
ANB_INLINE uint32_t is_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
ANB_INLINE vf load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
ANB_INLINE vf load_bfloat(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// Rounded to nearest even; any number for NaN and what an int32 cannot hold.
ANB_INLINE void store_ints(int32_t* p, vf x) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(x.v)); }
ANB_INLINE void store_bytes(uint8_t* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }
ANB_INLINE vf load_ints(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
ANB_INLINE void scatter(float* p, int stride, vf x) {  // lane i to p[i * stride]
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_i32scatter_ps(p, _mm512_mullo_epi32(lane, _mm512_set1_epi32(stride)), x.v, 4);
}
ANB_INLINE void store_half(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }
ANB_INLINE float hmax(vf x) {  // NaN lanes may be passed over
  __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
ANB_INLINE float hmax_sticky(vf x) {  // of numbers that are not negative; NaN if any is NaN
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(_mm512_castps_si512(x.v))))));
}
ANB_INLINE float hsum(vf x) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
// 2^x for x <= 127; exactly 0 below kMinExp2 (and at -inf); NaN stays NaN.
ANB_INLINE vf exp2(vf x) {
  const __m512 n = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x.v, n);
  __m512 p = _mm512_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2[i]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(kMinExp2), _CMP_NLT_UQ), p, n)};
}
// 2^max(x, kMinWeight) for x <= 127, in half the time and 18 bits; NaN stays NaN.
ANB_INLINE vf exp2_weight(vf x) {
  x = max(set1(kMinWeight), x);
  const __m512 n = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x.v, n);  // exact, unlike that of vreduceps, which rounds in the direction of n
  __m512 p = _mm512_set1_ps(kExp2Weight[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2Weight[i]));
  return {_mm512_scalef_ps(p, n)};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr bool kHasFma = true;
struct vf {
  __m256 a, b;
};
ANB_INLINE vf zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ANB_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ANB_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ANB_INLINE void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
ANB_INLINE vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
ANB_INLINE vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
ANB_INLINE vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
ANB_INLINE vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
ANB_INLINE vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
ANB_INLINE vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
ANB_INLINE vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
ANB_INLINE __m256 max_bits(__m256 x, __m256 y) {
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
ANB_INLINE vf max_sticky(vf x, vf y) { return {max_bits(x.a, y.a), max_bits(x.b, y.b)}; }
ANB_INLINE __m256 lane_mask(uint32_t mask) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), bit), bit));
}
ANB_INLINE vf select(uint32_t mask, vf yes, vf no) {
  return {_mm256_blendv_ps(no.a, yes.a, lane_mask(mask & 255)), _mm256_blendv_ps(no.b, yes.b, lane_mask(mask >> 8))};
}
ANB_INLINE uint32_t is_less(vf x, vf y) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))) << 8;
}
ANB_INLINE uint32_t is_equal(vf x, vf y) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ))) |
         uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ))) << 8;
}
ANB_INLINE __m128i load_16_bytes(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
ANB_INLINE vf load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load_16_bytes(p)), _mm256_cvtph_ps(load_16_bytes(p + 8))}; }
ANB_INLINE __m256 widen_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
}
ANB_INLINE vf load_bfloat(const uint16_t* p) { return {widen_bfloat(p), widen_bfloat(p + 8)}; }
ANB_INLINE void store_ints(int32_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_cvtps_epi32(x.a));
  _mm256_storeu_si256((__m256i*)(p + 8), _mm256_cvtps_epi32(x.b));
}
ANB_INLINE vf load_ints(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)), _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(p + 8)))};
}
ANB_INLINE void store_half(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
ANB_INLINE float hmax(vf x) {
  const __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
ANB_INLINE float hsum(vf x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
ANB_INLINE __m256 exp2_half(__m256 x) {
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2[i]));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(kMinExp2), _CMP_LT_OQ);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}
ANB_INLINE vf exp2(vf x) { return {exp2_half(x.a), exp2_half(x.b)}; }
ANB_INLINE __m256 exp2_weight_half(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(kMinWeight), x);
  const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(kExp2Weight[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2Weight[i]));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}
ANB_INLINE vf exp2_weight(vf x) { return {exp2_weight_half(x.a), exp2_weight_half(x.b)}; }

#else

constexpr bool kHasFma = false;
struct vf {
  float v[16];
};
#define ANB_LANES(expression) \
  vf r; \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r
ANB_INLINE vf zero() { ANB_LANES(0.0f); }
ANB_INLINE vf set1(float x) { ANB_LANES(x); }
ANB_INLINE vf load(const float* p) { ANB_LANES(p[i]); }
ANB_INLINE void store(float* p, vf x) { memcpy(p, x.v, sizeof(x.v)); }
ANB_INLINE vf add(vf a, vf b) { ANB_LANES(a.v[i] + b.v[i]); }
ANB_INLINE vf sub(vf a, vf b) { ANB_LANES(a.v[i] - b.v[i]); }
ANB_INLINE vf mul(vf a, vf b) { ANB_LANES(a.v[i] * b.v[i]); }
ANB_INLINE vf div(vf a, vf b) { ANB_LANES(a.v[i] / b.v[i]); }
ANB_INLINE vf fma(vf a, vf b, vf c) { ANB_LANES(a.v[i] * b.v[i] + c.v[i]); }
ANB_INLINE vf max(vf a, vf b) { ANB_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ANB_INLINE vf min(vf a, vf b) { ANB_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
ANB_INLINE vf max_sticky(vf a, vf b) { ANB_LANES(a.v[i] > b.v[i] || a.v[i] != a.v[i] ? a.v[i] : b.v[i]); }
ANB_INLINE vf select(uint32_t mask, vf yes, vf no) { ANB_LANES(mask >> i & 1 ? yes.v[i] : no.v[i]); }
ANB_INLINE uint32_t is_less(vf a, vf b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint32_t(a.v[i] < b.v[i]) << i;
  return mask;
}
ANB_INLINE uint32_t is_equal(vf a, vf b) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint32_t(a.v[i] == b.v[i]) << i;
  return mask;
}
ANB_INLINE vf load_half(const uint16_t* p) { ANB_LANES(half_to_float(p[i])); }
ANB_INLINE vf load_bfloat(const uint16_t* p) { ANB_LANES(bfloat_to_float(p[i])); }
ANB_INLINE void store_ints(int32_t* p, vf x) {
  for (int i = 0; i < 16; ++i) p[i] = __builtin_fabsf(x.v[i]) < 0x1p30f ? int32_t((x.v[i] + copysignf(0x1.8p23f, x.v[i])) - copysignf(0x1.8p23f, x.v[i])) : 0;
}
ANB_INLINE vf load_ints(const int32_t* p) { ANB_LANES(float(p[i])); }
ANB_INLINE void store_half(uint16_t* p, vf x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}
ANB_INLINE float hmax(vf x) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x.v[i] = x.v[i] > x.v[i + n] ? x.v[i] : x.v[i + n];
  return x.v[0];
}
ANB_INLINE float hsum(vf x) {
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) x.v[i] += x.v[i + n];
  return x.v[0];
}
ANB_INLINE float exp2_lane(float x) {
  if (x < kMinExp2) return 0.0f;
  const float n = (x + 0x1.8p23f) - 0x1.8p23f, f = x - n;
  float p = kExp2[4];
  for (int i = 3; i >= 0; --i) p = p * f + kExp2[i];
  p = p * f + 1.0f;
  return x == x ? p * bits_to_float(uint32_t(int(n) + 127) << 23) : x;
}
ANB_INLINE vf exp2(vf x) { ANB_LANES(exp2_lane(x.v[i])); }
ANB_INLINE vf exp2_weight(vf x) { return exp2(max(set1(kMinWeight), x)); }
#undef ANB_LANES

#endif

// The first n numbers, zeros after.
ANB_INLINE vf load_first(const float* p, int n) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

#if !defined(__AVX512F__)
ANB_INLINE void scatter(float* p, int stride, vf x) {  // lane i to p[i * stride]
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i * stride] = lanes[i];
}
// The low bytes of the rounded numbers.
ANB_INLINE void store_bytes(uint8_t* p, vf x) {
  int32_t words[kLanes];
  store_ints(words, x);
  for (int i = 0; i < kLanes; ++i) p[i] = uint8_t(words[i]);
}
// Largest of numbers that are not negative; NaN if any is NaN.
ANB_INLINE float hmax_sticky(vf x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] || lanes[i] != lanes[i] ? lanes[i] : lanes[i + n];
  return lanes[0];
}
#endif

ANB_INLINE vf abs(vf x) { return max(x, sub(zero(), x)); }  // of numbers: NaN may get lost

// 2^x of one number, the same bits as in a lane of exp2(vf).
ANB_INLINE float exp2_scalar(float x) {
  float lanes[kLanes];
  store(lanes, exp2(set1(x)));
  return lanes[0];
}

}  // namespace ANB_ISA
}  // namespace anabranch
