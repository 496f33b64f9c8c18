// File formats to panels: done once at load. Block layouts as in the GGUF specification (see kernels/formats.py for the plain version).
#include <cmath>

#include "linear.h"
#include "threads.h"

namespace anabranch {
namespace {

enum class Format : int32_t { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

// 32 weights of a row: value = scale * (code - zero) + min, with one scale for either half.
struct Group {
  uint8_t codes[kGroup];
  float scale[2];
  float min;
  int zero;
};

float read_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

void set_scale(Group& g, float scale, float min, int zero) {
  g.scale[0] = g.scale[1] = scale;
  g.min = min;
  g.zero = zero;
}

void read_nibbles(Group& g, const uint8_t* p) {
  for (int i = 0; i < 16; ++i) {
    g.codes[i] = p[i] & 15;
    g.codes[i + 16] = p[i] >> 4;
  }
}

void add_fifth_bits(Group& g, const uint8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  for (int i = 0; i < kGroup; ++i) g.codes[i] |= (bits >> i & 1) << 4;
}

// Scale and min of sub-block j of Q4_K and Q5_K: 6 bits each, packed into 12 bytes.
void read_scale_and_min(const uint8_t* s, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = s[j] & 63;
    *min = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

void read_k45(Group& g, const uint8_t* block, int j, bool has_fifth_bits) {
  int scale, min;
  read_scale_and_min(block + 4, j, &scale, &min);
  const uint8_t* high = block + 16;
  const uint8_t* low = high + (has_fifth_bits ? 32 : 0) + j / 2 * 32;
  for (int i = 0; i < kGroup; ++i) {
    g.codes[i] = uint8_t((j % 2 ? low[i] >> 4 : low[i] & 15) | (has_fifth_bits ? (high[i] >> j & 1) << 4 : 0));
  }
  set_scale(g, read_half(block) * float(scale), -(read_half(block + 2) * float(min)), 0);
}

void read_q6_k(Group& g, const uint8_t* block, int j) {
  const int half = j / 4, quarter = j % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kGroup; ++i) {
    g.codes[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * quarter) & 3) << 4);
  }
  const float d = read_half(block + 208);
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192) + half * 8 + quarter * 2;
  set_scale(g, d * float(scales[0]), 0.0f, 32);
  g.scale[1] = d * float(scales[1]);
}

// Group `index` of a row in a block format.
void read_group(Format format, const uint8_t* row, int index, Group& g) {
  const uint8_t* p;
  switch (format) {
    case Format::q8_0:
      p = row + size_t(index) * 34;
      for (int i = 0; i < kGroup; ++i) g.codes[i] = p[2 + i] ^ 0x80;
      return set_scale(g, read_half(p), 0.0f, 128);
    case Format::q4_0:
      p = row + size_t(index) * 18;
      read_nibbles(g, p + 2);
      return set_scale(g, read_half(p), 0.0f, 8);
    case Format::q4_1:
      p = row + size_t(index) * 20;
      read_nibbles(g, p + 4);
      return set_scale(g, read_half(p), read_half(p + 2), 0);
    case Format::q5_0:
      p = row + size_t(index) * 22;
      read_nibbles(g, p + 6);
      add_fifth_bits(g, p + 2);
      return set_scale(g, read_half(p), 0.0f, 16);
    case Format::q5_1:
      p = row + size_t(index) * 24;
      read_nibbles(g, p + 8);
      add_fifth_bits(g, p + 4);
      return set_scale(g, read_half(p), read_half(p + 2), 0);
    case Format::q4_k: return read_k45(g, row + size_t(index / 8) * 144, index % 8, false);
    case Format::q5_k: return read_k45(g, row + size_t(index / 8) * 176, index % 8, true);
    case Format::q6_k: return read_q6_k(g, row + size_t(index / 8) * 210, index % 8);
    default: return;
  }
}

float read_value(Format format, const uint8_t* row, int i) {
  if (format == Format::f32) {
    float f;
    std::memcpy(&f, row + size_t(i) * 4, 4);
    return f;
  }
  uint16_t half;
  std::memcpy(&half, row + size_t(i) * 2, 2);
  return format == Format::f16 ? half_to_float(half) : bfloat_to_float(half);
}

constexpr bool is_float(Format format) { return format <= Format::bf16; }

void read_values(Format format, const uint8_t* row, int index, int k, float* values) {
  if (is_float(format)) {
    for (int i = 0; i < kGroup; ++i) values[i] = index * kGroup + i < k ? read_value(format, row, index * kGroup + i) : 0.0f;
    return;
  }
  Group g;
  read_group(format, row, index, g);
  for (int i = 0; i < kGroup; ++i) values[i] = g.scale[i / 16] * float(int(g.codes[i]) - g.zero) + g.min;
}

// Float weights to 8 bits. The scale is rounded up to what the panel can store before codes are computed against it, so rounding it
// costs nothing but a slightly coarser step. Returns false where a half-precision scale would be too coarse or too large.
bool quantize_values(const float* values, bool wide, Group& g) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::fabs(values[i]) > largest ? std::fabs(values[i]) : largest;
  float scale = largest / 127.0f;
  bool fits = true;
  if (!wide && scale > 0.0f) {
    uint16_t half = float_to_half(scale);
    if (half_to_float(half) < scale) ++half;
    scale = half_to_float(half);
    fits = half >= 8 && half < 0x7c00;
  } else if (wide) {
    constexpr uint32_t dropped = (1u << (24 - kScaleBits)) - 1;
    scale = bits_to_float((float_to_bits(scale) + dropped) & ~dropped);
  }
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) g.codes[i] = uint8_t(std::lrintf(values[i] * inverse) + 128);
  set_scale(g, scale, 0.0f, 128);
  return fits;
}

void put_scale(uint8_t* scales, bool wide, int at, float value) {
  if (wide) {
    std::memcpy(scales + at * 4, &value, 4);
  } else {
    const uint16_t half = float_to_half(value);
    std::memcpy(scales + at * 2, &half, 2);
  }
}

// Codes go out by words of four k: byte sums never carry, since code + shift < 256.
void put_group(PanelKind kind, int column, const Group& g, uint8_t* out) {
  const int shift = is_affine(kind) ? 0 : (is_4bit(kind) ? 8 : 128) - g.zero;
  uint32_t words[8];
  std::memcpy(words, g.codes, sizeof words);
  for (uint32_t& word : words) word += uint32_t(shift) * 0x01010101u;
  uint8_t* to = out + column * 4;
  if (is_4bit(kind)) {
    for (int i = 0; i < 8; i += 2, to += 4 * kPanelColumns) {
      const uint32_t both = words[i] | words[i + 1] << 4;
      std::memcpy(to, &both, 4);
    }
  } else {
    for (int i = 0; i < 8; ++i, to += 4 * kPanelColumns) std::memcpy(to, &words[i], 4);
  }
  uint8_t* scales = out + code_bytes(kind);
  put_scale(scales, is_wide(kind), column, g.scale[0]);
  if (kind == PanelKind::halves8) put_scale(scales, true, kPanelColumns + column, g.scale[1]);
  if (is_affine(kind)) put_scale(scales + scale_bytes(kind), is_wide(kind), column, g.min);
}

}  // namespace

void read_row(const Table& table, int row, float* out) {
  const uint8_t* from = table.rows + size_t(row) * table.row_bytes;
  for (int i = 0; i < table.k; i += kGroup) {
    float values[kGroup];
    read_values(Format(table.format), from, i / kGroup, table.k, values);
    std::memcpy(out + i, values, size_t(table.k - i < kGroup ? table.k - i : kGroup) * 4);
  }
}

}  // namespace anabranch

using namespace anabranch;

extern "C" int64_t anb_panel_bytes(int kind, int k) { return int64_t(group_bytes(PanelKind(kind))) * ceil_div(k, kGroup); }

// Pack `num_rows` rows of k weights, row_bytes apart, into ceil(num_rows / 32) panels of anb_panel_bytes each, out_step bytes apart; `out`
// is zeroed.
// Returns 0, or the number of groups whose scale does not fit a half-precision panel (float formats only).
extern "C" int64_t anb_pack(int format, const uint8_t* rows, int num_rows, int k, int64_t row_bytes, int kind_index, uint8_t* out, int64_t out_step) {
  const auto kind = PanelKind(kind_index);
  const auto from = Format(format);
  const int num_groups = ceil_div(k, kGroup), num_panels = ceil_div(num_rows, kPanelColumns);
  std::atomic<int64_t> num_misfits{0};
  PoolLease pool;
  pool->parallel_for(num_panels, [&](int panel, int) {
    uint8_t* to = out + panel * out_step;
    const int num_columns = num_rows - panel * kPanelColumns < kPanelColumns ? num_rows - panel * kPanelColumns : kPanelColumns;
    for (int group = 0; group < num_groups; ++group, to += group_bytes(kind)) {
      for (int column = 0; column < num_columns; ++column) {
        const uint8_t* row = rows + size_t(panel * kPanelColumns + column) * row_bytes;
        float values[kGroup];
        Group g;
        if (kind == PanelKind::f32) {
          read_values(from, row, group, k, values);
          for (int i = 0; i < kGroup; ++i) std::memcpy(to + (i * kPanelColumns + column) * 4, &values[i], 4);
          continue;
        }
        if (is_float(from)) {
          read_values(from, row, group, k, values);
          if (!quantize_values(values, is_wide(kind), g)) num_misfits.fetch_add(1, std::memory_order_relaxed);
        } else {
          read_group(from, row, group, g);
        }
        put_group(kind, column, g, to);
      }
    }
  });
  return num_misfits.load();
}
