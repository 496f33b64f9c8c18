// The C interface of the step executor; kernels/backends/cpu.py mirrors these structs with ctypes.
//
// A program is a model's forward as a tape of operations over numbered buffers, recorded once. Running it takes one call per step.
#pragma once

#include "attention.h"
#include "linear.h"

namespace anabranch {

struct RopeTable;
struct Program;

enum class OpKind : int32_t { embed = 0, attention_input = 1, attention = 2, linear_add = 3, gated_mlp_input = 4, logits = 5 };
constexpr int kNumOpKinds = 6;

// One operation of kernels/interface.py. `source` and `target` are buffers; unused fields are zero.
struct OpSpec {
  OpKind kind;
  int32_t layer;
  int32_t source;        // embed: unused
  int32_t target;        // linear_add: the residual, updated in place; logits: unused
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t window;        // 0: all
  float eps;
  float scale;
  const Matrix* matrix;  // null in embed
  const Table* table;    // of embed
  const float* norm;
  const float* q_norm;   // or null
  const float* k_norm;   // or null
  RopeTable* rope;
};

// One StepBatch. `view` is read for the whole run.
struct StepArgs {
  StepView view;
  int32_t num_logits;
  int32_t reserved;
  const int32_t* token_ids;   // [num_tokens]
  const int32_t* positions;   // [num_tokens]
  const int32_t* logit_rows;  // [num_logits]
  float* logits;              // [num_logits, vocabulary]
};

}  // namespace anabranch

extern "C" {
// Cosines and sines of p * inv_freq[i], times magnitude, computed in double and rounded once; grows with the positions asked for.
anabranch::RopeTable* anb_rope_new(const double* inv_freq, int num_pairs, double magnitude);
void anb_rope_free(anabranch::RopeTable* rope);

anabranch::Program* anb_program_new(const anabranch::KVPool* kv);
void anb_program_free(anabranch::Program* program);
// A buffer of `width` values per token. Where `is_gated`, it holds what gated_mlp_input gives (quantized, unless its reader is exact).
int anb_program_buffer(anabranch::Program* program, int width, int is_gated);
void anb_program_add(anabranch::Program* program, const anabranch::OpSpec* op);
// Runs one step. Returns null, or a message about what does not fit (valid until the next call on this program).
const char* anb_program_run(anabranch::Program* program, const anabranch::StepArgs* step);

// Nanoseconds spent in each kind of operation since the program was made: [kNumOpKinds].
void anb_program_times(const anabranch::Program* program, uint64_t* spent_ns);

// Whole pages in every layer, in order.
void anb_copy_pages(const anabranch::KVPool* kv, const int32_t* src, const int32_t* dst, int num_pages);
void anb_poison_pages(const anabranch::KVPool* kv, const int32_t* pages, int num_pages);

// One matrix product, for tests and measurements: out [num_rows, num_columns] = x [num_rows, k] @ weights.T + bias.
void anb_matmul(const anabranch::Matrix* matrix, const float* x, int num_rows, float* out);
// out [num_ids, k]: rows of the table.
void anb_read_rows(const anabranch::Table* table, const int32_t* ids, int num_ids, float* out);
}
