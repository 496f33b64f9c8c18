// The integer half of mathlib.h: `vi` is 16 int32 lanes (or 64 bytes), the same results from every instruction set.
#pragma once

#include "mathlib.h"

namespace anabranch {
namespace ANB_ISA {

#if defined(__AVX512F__)

struct vi {
  __m512i v;
};
ANB_INLINE vi i_zero() { return {_mm512_setzero_si512()}; }
ANB_INLINE vi i_set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
ANB_INLINE vi i_load(const void* p) { return {_mm512_loadu_si512(p)}; }
ANB_INLINE void i_store(void* p, vi x) { _mm512_storeu_si512(p, x.v); }
ANB_INLINE vi i_add(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
ANB_INLINE vi i_sub(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
ANB_INLINE vi i_add_bytes(vi a, vi b) { return {_mm512_add_epi8(a.v, b.v)}; }
ANB_INLINE vi i_and(vi a, vi b) { return {_mm512_and_si512(a.v, b.v)}; }
ANB_INLINE vi i_max(vi a, vi b) { return {_mm512_max_epi32(a.v, b.v)}; }
// Bits 4 to 7 of each byte, moved to bits 0 to 3.
ANB_INLINE vi high_nibbles(vi x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
ANB_INLINE vf float_of_bits(vi x) { return {_mm512_castsi512_ps(x.v)}; }
ANB_INLINE vf to_float(vi x) { return {_mm512_cvtepi32_ps(x.v)}; }
ANB_INLINE vi round_to_int(vf x) { return {_mm512_cvtps_epi32(x.v)}; }  // to nearest even; INT32_MIN where it does not fit
ANB_INLINE vi bits_of(vf x) { return {_mm512_castps_si512(x.v)}; }
// Each lane gains the dot product of its 4 unsigned bytes of u and 4 signed bytes of s, exactly.
ANB_INLINE vi dot4(vi acc, vi u, vi s) { return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)}; }
// Each lane gains the dot product of its 2 signed words of a and of b; wraps.
ANB_INLINE vi dot2(vi acc, vi a, vi b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}
ANB_INLINE vi i_load_signed_bytes(const void* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }  // 32, as words
ANB_INLINE void store_words(int16_t* p, vi x0, vi x1) {  // 32 numbers, saturated
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // packs work within 128 bits
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(x0.v, x1.v)));
}
ANB_INLINE __m256i low_bytes(vi x0, vi x1) { return _mm256_set_m128i(_mm512_cvtepi32_epi8(x1.v), _mm512_cvtepi32_epi8(x0.v)); }
ANB_INLINE int32_t i_hmax(vi x) { return _mm512_reduce_max_epi32(x.v); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct vi {
  __m256i a, b;
};
ANB_INLINE vi i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
ANB_INLINE vi i_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ANB_INLINE vi i_load(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
ANB_INLINE void i_store(void* p, vi x) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
ANB_INLINE vi i_add(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
ANB_INLINE vi i_sub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
ANB_INLINE vi i_add_bytes(vi x, vi y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
ANB_INLINE vi i_and(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
ANB_INLINE vi i_max(vi x, vi y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
ANB_INLINE __m256i high_nibbles_half(__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
ANB_INLINE vi high_nibbles(vi x) { return {high_nibbles_half(x.a), high_nibbles_half(x.b)}; }
ANB_INLINE vf float_of_bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
ANB_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
ANB_INLINE vi round_to_int(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
ANB_INLINE vi bits_of(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
// vpmaddubsw would saturate (2 * 255 * 127 > 32767), so even and odd bytes are widened to 16 bits instead.
ANB_INLINE __m256i dot4_half(__m256i acc, __m256i u, __m256i s) {
  const __m256i s_even = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8), s_odd = _mm256_srai_epi16(s, 8);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), s_even);
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), s_odd);
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
ANB_INLINE vi dot4(vi acc, vi u, vi s) { return {dot4_half(acc.a, u.a, s.a), dot4_half(acc.b, u.b, s.b)}; }
ANB_INLINE vi dot2(vi acc, vi x, vi y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}
ANB_INLINE vi i_load_signed_bytes(const void* p) {
  return {_mm256_cvtepi8_epi16(load_16_bytes(p)), _mm256_cvtepi8_epi16(load_16_bytes((const char*)p + 16))};
}
ANB_INLINE void store_words(int16_t* p, vi x0, vi x1) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x0.a, x0.b), 0xd8));
  _mm256_storeu_si256((__m256i*)(p + 16), _mm256_permute4x64_epi64(_mm256_packs_epi32(x1.a, x1.b), 0xd8));
}
ANB_INLINE int32_t i_hmax(vi x) {
  const __m256i a = _mm256_max_epi32(x.a, x.b);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
ANB_INLINE __m256i low_bytes(vi x0, vi x1) {  // packs work within 128 bits: the permutation undoes that
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(x0.a, x0.b), _mm256_packs_epi32(x1.a, x1.b));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

#else

struct vi {
  int32_t v[16];
};
#define ANB_LANES(expression) \
  vi r; \
  for (int i = 0; i < 16; ++i) r.v[i] = int32_t(expression); \
  return r
ANB_INLINE vi i_zero() { ANB_LANES(0); }
ANB_INLINE vi i_set1(int32_t x) { ANB_LANES(x); }
ANB_INLINE vi i_load(const void* p) {
  vi r;
  memcpy(r.v, p, sizeof(r.v));
  return r;
}
ANB_INLINE void i_store(void* p, vi x) { memcpy(p, x.v, sizeof(x.v)); }
ANB_INLINE vi i_add(vi a, vi b) { ANB_LANES(uint32_t(a.v[i]) + uint32_t(b.v[i])); }  // wraps, as vector units do
ANB_INLINE vi i_sub(vi a, vi b) { ANB_LANES(uint32_t(a.v[i]) - uint32_t(b.v[i])); }
ANB_INLINE vi i_add_bytes(vi a, vi b) {
  ANB_LANES(((a.v[i] & 0x7f7f7f7f) + (b.v[i] & 0x7f7f7f7f)) ^ ((a.v[i] ^ b.v[i]) & int32_t(0x80808080u)));
}
ANB_INLINE vi i_and(vi a, vi b) { ANB_LANES(a.v[i] & b.v[i]); }
ANB_INLINE vi i_max(vi a, vi b) { ANB_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
ANB_INLINE vi high_nibbles(vi x) { ANB_LANES(uint32_t(x.v[i]) >> 4 & 0x0f0f0f0f); }
ANB_INLINE vi round_to_int(vf x) {
  ANB_LANES(x.v[i] >= -2147483648.0f && x.v[i] < 2147483648.0f ? int32_t(nearbyintf(x.v[i])) : INT32_MIN);
}
ANB_INLINE vi bits_of(vf x) { ANB_LANES(float_to_bits(x.v[i])); }
ANB_INLINE vi dot4(vi acc, vi u, vi s) {
  for (int i = 0; i < 16; ++i) {
    for (int b = 0; b < 32; b += 8) acc.v[i] += int32_t(uint32_t(u.v[i]) >> b & 255) * int8_t(uint32_t(s.v[i]) >> b);
  }
  return acc;
}
ANB_INLINE vi dot2(vi acc, vi a, vi b) {
  ANB_LANES(uint32_t(acc.v[i]) + uint32_t(int16_t(a.v[i]) * int16_t(b.v[i])) + uint32_t((a.v[i] >> 16) * (b.v[i] >> 16)));
}
#undef ANB_LANES
ANB_INLINE vi i_load_signed_bytes(const void* p) {
  int16_t words[32];
  for (int i = 0; i < 32; ++i) words[i] = ((const int8_t*)p)[i];
  return i_load(words);
}
ANB_INLINE void store_words(int16_t* p, vi x0, vi x1) {
  for (int i = 0; i < 32; ++i) {
    const int32_t x = i < 16 ? x0.v[i] : x1.v[i - 16];
    p[i] = int16_t(x < -32768 ? -32768 : x > 32767 ? 32767 : x);
  }
}
ANB_INLINE vf float_of_bits(vi x) {
  vf r;
  memcpy(r.v, x.v, sizeof(r.v));
  return r;
}
ANB_INLINE vf to_float(vi x) {
  vf r;
  for (int i = 0; i < 16; ++i) r.v[i] = float(x.v[i]);
  return r;
}
ANB_INLINE int32_t i_hmax(vi x) {
  int32_t best = x.v[0];
  for (int i = 1; i < 16; ++i) best = x.v[i] > best ? x.v[i] : best;
  return best;
}

#endif

// Stores 32 numbers in [-128, 127] as bytes; sums of the first 16 and of the others.
ANB_INLINE void store_bytes(int8_t* p, vi x0, vi x1, int32_t* sum0, int32_t* sum1) {
#if defined(__AVX2__)
  const __m256i bytes = low_bytes(x0, x1);
  _mm256_storeu_si256((__m256i*)p, bytes);
  const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());  // of 8 bytes + 128 each
  const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
  *sum0 = _mm_cvtsi128_si32(low) + _mm_extract_epi32(low, 2) - 16 * 128;
  *sum1 = _mm_cvtsi128_si32(high) + _mm_extract_epi32(high, 2) - 16 * 128;
#else
  *sum0 = *sum1 = 0;
  for (int i = 0; i < kLanes; ++i) {
    *sum0 += p[i] = int8_t(x0.v[i]);
    *sum1 += p[i + kLanes] = int8_t(x1.v[i]);
  }
#endif
}

}  // namespace ANB_ISA
}  // namespace anabranch
