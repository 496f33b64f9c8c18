// Cosines and sines of rotary embeddings, by position.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace anabranch {

// cos and sin of p * inv_freq[i], times magnitude, computed in double and rounded once, so that a position's values never depend on the step.
// Positions are tabulated in blocks as they first occur; blocks never move.
struct RopeTable {
  static constexpr int kBlock = 256;
  std::vector<double> inv_freq;
  double magnitude;
  std::vector<std::vector<float>> blocks;  // [kBlock][num_pairs cosines, num_pairs sines] each, or empty
  std::vector<const float*> rows;          // of the step in hand: each token's cosines and sines

  int num_pairs() const { return int(inv_freq.size()); }

  void begin_step(const int32_t* positions, int num_tokens) {
    rows.resize(size_t(num_tokens));
    for (int t = 0; t < num_tokens; ++t) {
      const auto block = size_t(positions[t] / kBlock);
      if (block >= blocks.size()) blocks.resize(block + 1);
      if (blocks[block].empty()) blocks[block] = tabulate(int64_t(block) * kBlock);
      rows[size_t(t)] = blocks[block].data() + size_t(positions[t] % kBlock) * 2 * inv_freq.size();
    }
  }

 private:
  std::vector<float> tabulate(int64_t first) const {
    std::vector<float> block(kBlock * 2 * inv_freq.size() + 1);  // never empty, even without pairs
    float* to = block.data();
    for (int64_t p = first; p < first + kBlock; ++p) {
      for (double f : inv_freq) *to++ = float(std::cos(double(p) * f) * magnitude);
      for (double f : inv_freq) *to++ = float(std::sin(double(p) * f) * magnitude);
    }
    return block;
  }
};

}  // namespace anabranch
