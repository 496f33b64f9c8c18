// What the plan tells the kernels: plain structs, shared by attention.cpp (any machine) and attention_{avx512,avx2,plain}.cpp.
#pragma once

#include <atomic>
#include <cstdint>

#include "attention.h"

namespace anabranch {

// Slots are summed in blocks of this many, aligned at slot 0; blocks merge in ascending order. Part of the definition of the result.
constexpr int kBlock = 128;

// The slots that one new token sees: [lo, hi), of which those from `base` on only if their bit is set in `tree`.
struct Visible {
  int32_t lo, hi;
  int32_t base;            // hi where there is no tree
  const uint64_t* tree;    // bit i: slot base + i
};

struct Row {
  const int32_t* pages;
  int32_t first_token, last_token;
  int32_t first_block, last_block;  // blocks in which some token of the row sees a slot
  int32_t kv_len;
};

// Consecutive new tokens that one unit computes together: of one row, or of several with the same pages up to block shared_blocks.
struct Span {
  int32_t first_token, last_token;
  int32_t first_row, last_row;
  int32_t first_block, last_block;
  int32_t shared_blocks;   // 0 for a single row
  int32_t is_split;        // its units each take some blocks, and the last to finish merges
  int64_t partial_index;   // of its first row of partials
};

enum class UnitKind : int32_t { whole, shared, own };

struct Unit {
  int32_t span;
  int32_t kv_head;
  UnitKind kind;
  int32_t row;                      // own: which row
  int32_t first_block, last_block;  // shared, own
  float cost;
};

// One call of attention(), as the kernels see it.
struct Job {
  const KVPool* kv;
  const uint8_t* layer;             // kv->data of this layer
  const Visible* visible;           // [num_tokens]
  const Row* rows;
  const Span* spans;
  float* partials;                  // [partial][partial_stride]: output [padded_dim], max, sum (-1: sees nothing there)
  int64_t partial_stride;
  std::atomic<int32_t>* remaining;  // [span][kv_head] units not done
  const int32_t* num_units;         // [span] units per head
  int32_t heads_per_kv;
  float scale;                      // of q.k, times log2(e)
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
};

// One instruction set's kernels.
struct AttentionKernels {
  int64_t (*scratch_bytes)(const KVPool& kv, int max_span_rows);
  void (*run_unit)(const Job& job, const Unit& unit, const Unit* next, void* scratch);  // next: what this thread likely runs after it
  void (*write_kv)(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_tokens, const float* k, int64_t k_stride,
                   const float* v, int64_t v_stride);
};

namespace plain { extern const AttentionKernels attention_kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const AttentionKernels attention_kernels; }
namespace avx512 { extern const AttentionKernels attention_kernels; }
#endif

}  // namespace anabranch
