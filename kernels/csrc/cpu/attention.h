// Paged attention over ragged rows of new tokens: prefill, extend, decode and token trees in one call.
//
//   KVPool kv; kv_layout(&kv);                              // once: sizes and strides
//   AttentionPlan plan;                                     // kept from step to step: it owns the scratch
//   if (const char* error = plan.begin(kv, step)) ...       // once per step
//   per layer: write_kv(...) for every new token and KV head, from any thread; then
//              attention(plan, pool, {...});                // one parallel_for
//
// What a query row gives depends on its own q, the KV it sees and their slots, bit for bit: not on other rows, on how a prompt was
// chunked, on the page size, on where pages lie, on groups or on threads. See attention_kernel.h for how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace anabranch {

class ThreadPool;

enum class KVType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3, i16 = 4 };

// KV pages of all layers: data[page_id][layer][kv_head] -> K, V and (i8, i16) scales of page_size slots, `head_bytes` in all. A page is one
// piece of memory: a copy is one move, and a short context touches little memory where a pool by layers touches some in each.
// K lies in chunks of `chunk` slots, each [padded_dim][chunk], so that slots are the lanes of a vector; V is [page_size][padded_dim].
// i8 and i16 keep together what one integer instruction multiplies: K chunks are [padded_dim / 2][chunk][2], and V, where chunk is 16, is
// [page_size / 2][padded_dim][2]. padded_dim is head_dim rounded up to 16; the padding is zero.
struct KVPool {
  uint8_t* data;          // 64-byte aligned, page_bytes * num_pages
  int64_t num_pages;
  int32_t page_size;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t type;           // KVType
  // Filled by kv_layout.
  int32_t chunk;          // 16 where page_size is a multiple of 16, else page_size
  int32_t padded_dim;
  int32_t v_offset;       // bytes from K to V of one (page, head)
  int32_t scale_offset;   // i8, i16: f32 K scales [page_size], then V scales
  int64_t head_bytes;
  int64_t page_bytes;     // of all layers
  int64_t layer_bytes;    // of one layer's part of a page
};

// Fills the derived fields. Returns the bytes that `data` must have, or 0 where a field is out of range.
extern "C" int64_t anb_kv_layout(KVPool* kv);

struct KVSlot {
  int32_t page_id;
  int32_t offset;         // in the page
};

// Writes K and V of `num_tokens` tokens for one KV head: k + i * k_stride and v + i * v_stride point to head_dim floats (after rope),
// slots[i] says where they go. f16 saturates at +-65504. i8 rounds to nearest in 127 steps of the largest number of each
// token and head; i16 in 32767 steps of the length of K, and 8191 of the largest number of V.
// Different (token, head) may be written from different threads at once.
void write_kv(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_tokens,
              const float* k, int64_t k_stride, const float* v, int64_t v_stride);

// A StepBatch (kernels/layout.py) as raw arrays; read during begin() only.
struct StepView {
  int32_t num_rows;
  int32_t num_tokens;
  int32_t num_trees;
  int32_t num_groups;
  int32_t num_page_ids;
  int32_t reserved;
  const int32_t* q_indptr;      // [num_rows + 1]
  const int32_t* kv_lens;       // [num_rows]
  const int32_t* page_indptr;   // [num_rows + 1]
  const int32_t* page_ids;      // [num_page_ids]
  const int32_t* tree_rows;     // [num_trees]
  const int32_t* tree_indptr;   // [num_trees + 1] into tree_parents
  const int32_t* tree_parents;
  const int32_t* groups;        // [num_groups][3]: first_row, last_row, num_tokens
};

struct AttentionCall {
  int32_t layer;
  int32_t num_q_heads;          // a multiple of kv.num_kv_heads
  float scale;                  // multiplies q.k
  int32_t window;               // tokens seen back, itself included; 0: all
  const float* q;               // token i, head h at q + i * q_stride + h * head_dim
  int64_t q_stride;
  float* out;                   // same shape as q
  int64_t out_stride;
};

class AttentionPlan {
 public:
  AttentionPlan();
  ~AttentionPlan();

  // Takes in one step. Returns null, or what does not fit together (valid until the next call on this plan).
  const char* begin(const KVPool& kv, const StepView& step);

  // Where each new token's KV goes: [num_tokens].
  const KVSlot* slots() const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// Attention of every new token over the pages of `call.layer`, whose KV has been written. One parallel_for over the pool.
void attention(AttentionPlan& plan, ThreadPool& pool, const AttentionCall& call);

}  // namespace anabranch
