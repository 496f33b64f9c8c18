// What every file of the CPU kernels shares: the instruction set in use, half precision, small helpers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace anabranch {

// Instruction sets with a variant of their own, each including the ones before. avx512 means F, BW, DQ, VL and VNNI.
enum class Isa : int { plain = 0, avx2 = 1, avx512 = 2 };

// The one in use: the best that this CPU has, unless anb_set_isa lowered it. All variants compute bit-equal results.
Isa isa();

static inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

// IEEE binary16 to binary32: exact, also for subnormals, infinities and NaN.
static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = uint32_t(h & 0x7fff) << 13;
  if (magnitude >= 0x0f800000u) return bits_to_float(sign | magnitude | 0x70000000u);  // infinity or NaN
  // Exponents are rebased by a multiplication with 2^112, which normalises subnormals as well.
  return bits_to_float(float_to_bits(bits_to_float(magnitude) * bits_to_float(0x77800000u)) | sign);
}

// binary32 to binary16, rounding to nearest even; overflow gives infinity.
static inline uint16_t float_to_half(float f) {
  const uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds at the right bit
    return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
}

static inline float bfloat_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
static constexpr size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

}  // namespace anabranch

extern "C" {
int anb_isa();
// For tests and diagnosis: use at most this variant (see Isa) from now on. Returns the one in use.
int anb_set_isa(int highest);
}
