// Writing new tokens' K and V into pages.
#pragma once

#include <type_traits>

#include "attention_int.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

constexpr float kMaxHalf = 65504.0f;

// A scale for each of K and V (attention_int.h). NaN or infinity makes it NaN, and with it whatever reads the slot.
template <class T>
void write_slot_int(const KVPool& kv, uint8_t* head, int offset, const float* k, const float* v) {
  using Element = std::conditional_t<T::size == 1, int8_t, int16_t>;
  float* scales = (float*)(head + kv.scale_offset);
  const float k_scale = T::k_scale(k, kv.head_dim), v_scale = largest_size(v, kv.head_dim) / T::v_steps;
  scales[offset] = k_scale;
  scales[kv.page_size + offset] = v_scale;
  const vf k_inverse = set1(k_scale > 0.0f ? 1.0f / k_scale : 0.0f), v_inverse = set1(v_scale > 0.0f ? 1.0f / v_scale : 0.0f);
  const vf k_most = set1(T::k_steps), v_most = set1(T::v_steps);
  const int k_step = kv.chunk * 2, v_step = kv.chunk == kLanes ? 2 : 1;
  Element *k_at = (Element*)head + k_index(kv, offset, 0), *v_at = (Element*)(head + kv.v_offset) + v_index(kv, offset, 0);
  for (int d = 0; d < kv.padded_dim; d += kLanes) {
    int32_t ks[kLanes], vs[kLanes];
    store_ints(ks, min(k_most, max(sub(zero(), k_most), mul(load_first(k + d, kv.head_dim - d), k_inverse))));
    store_ints(vs, min(v_most, max(sub(zero(), v_most), mul(load_first(v + d, kv.head_dim - d), v_inverse))));
    for (int i = 0; i < kLanes; i += 2) {
      const Element two[2] = {Element(ks[i]), Element(ks[i + 1])};
      memcpy(k_at + (d + i) / 2 * k_step, two, sizeof(two));
    }
    for (int i = 0; i < kLanes; ++i) v_at[(d + i) * v_step] = Element(vs[i]);
  }
}

// Sixteen numbers as the pool stores them, to dst[0], dst[stride] ...
template <KVType type>
ANB_INLINE void put16(uint8_t* dst, int64_t stride, vf x) {
  if (type == KVType::f32) {
    if (stride == 1) store((float*)dst, x);
    else scatter((float*)dst, int(stride), x);
    return;
  }
  uint16_t words[kLanes];
  if (type == KVType::f16) {
    store_half(words, min(set1(kMaxHalf), max(set1(-kMaxHalf), x)));  // NaN stays
  } else {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) words[i] = float_to_bfloat(lanes[i]);
  }
  if (stride == 1) memcpy(dst, words, sizeof(words));
  else
    for (int i = 0; i < kLanes; ++i) ((uint16_t*)dst)[i * stride] = words[i];
}

template <KVType type>
ANB_INLINE void write_slot(const KVPool& kv, uint8_t* head, int offset, const float* k, const float* v) {
  constexpr int size = type == KVType::f32 ? 4 : 2;
  uint8_t* k_column = head + k_index(kv, offset, 0) * size;
  uint8_t* v_row = head + kv.v_offset + int64_t(offset) * kv.padded_dim * size;
  for (int d = 0; d < kv.padded_dim; d += kLanes) {
    put16<type>(k_column + int64_t(d) * kv.chunk * size, kv.chunk, load_first(k + d, kv.head_dim - d));
    put16<type>(v_row + d * size, 1, load_first(v + d, kv.head_dim - d));
  }
}

void write_kv(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_tokens, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride) {
  uint8_t* base = kv.data + layer * kv.layer_bytes + kv_head * kv.head_bytes;
  for (int i = 0; i < num_tokens; ++i, k += k_stride, v += v_stride) {
    uint8_t* head = base + slots[i].page_id * kv.page_bytes;
    switch (KVType(kv.type)) {
      case KVType::f32: write_slot<KVType::f32>(kv, head, slots[i].offset, k, v); break;
      case KVType::f16: write_slot<KVType::f16>(kv, head, slots[i].offset, k, v); break;
      case KVType::bf16: write_slot<KVType::bf16>(kv, head, slots[i].offset, k, v); break;
      case KVType::i8: write_slot_int<I8>(kv, head, slots[i].offset, k, v); break;
      case KVType::i16: write_slot_int<I16>(kv, head, slots[i].offset, k, v); break;
    }
  }
}

}  // namespace
}  // namespace ANB_ISA
}  // namespace anabranch
