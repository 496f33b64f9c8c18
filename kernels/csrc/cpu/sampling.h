// Choosing tokens from rows of logits, as kernels/layout.py SamplingBatch says. Rows are independent, bit for bit; logits are only read.
//
// Rules that SamplingBatch leaves open:
// - A row whose raw logits are not all finite, or of which edits, bans, mask and limit leave nothing (or +inf), gets token -1.
// - Tokens rank by edited logit, descending, equal ones by id. top-k keeps the first k; top-p, of those, the shortest run of at least
//   one whose weights reach top_p of their sum; min-p, of those, what weighs at least min_p times the heaviest. Each keeps at least one.
// - Weights are 2^((logit - largest) * log2(e) / temperature) in float32, summed in double over ascending ids. A temperature below
//   kMinTemperature is greedy.
// - The draw takes the lowest id at which the running sum of weights exceeds uniform * total.
#pragma once

#include <cstdint>

namespace anabranch {

class ThreadPool;

constexpr float kMinTemperature = 1e-6f;

// A SamplingBatch (kernels/layout.py) as raw arrays, [num_rows] unless said otherwise; null where the batch has None.
struct SamplingView {
  const float* logits;          // row r at logits + r * stride
  int64_t stride;
  int32_t num_rows;
  int32_t vocab;
  int32_t vocab_limit;          // 0: none
  int32_t mask_words;           // per row
  const uint32_t* mask;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seeds;
  const uint64_t* paths;
  const uint64_t* positions;
  const int32_t* num_top_logprobs;
  int32_t num_bias;
  int32_t num_penalties;
  const int32_t* bias_rows;     // [num_bias], ascending
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* penalty_rows;  // [num_penalties], ascending
  const int32_t* penalty_ids;
  const int32_t* penalty_counts;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
};

// Where results go. Row r's tops, num_top_logprobs[r] of them, start at r * max_top.
struct SampledView {
  int32_t* token_ids;           // [num_rows]
  float* logprobs;              // [num_rows], NaN where not asked
  int32_t* top_ids;             // [num_rows, max_top]
  float* top_logprobs;
  int64_t max_top;
};

// One parallel_for over the rows. Raw log-probabilities are over all `vocab` columns.
void sample(ThreadPool& pool, const SamplingView& batch, const SampledView& sampled);

// For j < n: the raw log-probability of logits[rows[j], ids[j]], and whether ids[j] is the row's argmax. NaN and 0 for a row that is not finite.
void logprobs_of(ThreadPool& pool, const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, const int32_t* ids, int32_t n,
                 float* logprobs, uint8_t* is_argmax);

// For j < n: ids and raw log-probabilities of the k most likely tokens of rows[j], descending, equal ones by id: [n, k] each. Ids are -1
// and log-probabilities NaN for a row that is not finite.
void top_logprobs(ThreadPool& pool, const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, int32_t n, int32_t k,
                  int32_t* ids, float* logprobs);

// One instruction set's kernels, each on one row.
struct SamplingKernels {
  int64_t (*scratch_bytes)(int32_t vocab);
  void (*sample_row)(const SamplingView& batch, int32_t row, const SampledView& sampled, void* scratch);
  void (*logprobs_row)(const float* logits, int32_t vocab, const int32_t* ids, int32_t n, float* logprobs, uint8_t* is_argmax);
  void (*top_row)(const float* logits, int32_t vocab, int32_t k, int32_t* ids, float* logprobs);
};

namespace plain { extern const SamplingKernels sampling_kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const SamplingKernels sampling_kernels; }
namespace avx512 { extern const SamplingKernels sampling_kernels; }
#endif

}  // namespace anabranch
