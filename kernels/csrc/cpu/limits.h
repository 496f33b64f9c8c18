// What this machine can do at most: multiply-adds and bytes read per second, on the pool's threads.
#pragma once

#include "common.h"

namespace anabranch {

// Results are returned so that no compiler drops the loops; seed is a small number that it cannot foresee.
struct LimitOps {
  float (*multiply_floats)(int64_t num_rounds, float seed);  // num_chains * 16 multiply-adds per round
  float (*multiply_bytes)(int64_t num_rounds, float seed);   // num_chains * 64
  float (*read)(const uint8_t* data, int64_t num_bytes);
  int num_chains;
};

}  // namespace anabranch

extern "C" {
// Multiply-adds per second of 32-bit floats and of bytes (into 32-bit sums), all threads together, in the best of some short runs.
double anb_float_peak();
double anb_byte_peak();
// Bytes read per second by all threads together, each going over its part of `data` again and again.
double anb_read_rate(const uint8_t* data, int64_t num_bytes);
}
