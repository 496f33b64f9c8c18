// Spreads the rows of sampling over the threads; the C interface of kernels/backends/cpu_sampling.py.
#include "sampling.h"

#include <new>

#include "common.h"
#include "threads.h"

namespace anabranch {
namespace {

const SamplingKernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512::sampling_kernels;
  if (isa() == Isa::avx2) return avx2::sampling_kernels;
#endif
  return plain::sampling_kernels;
}

}  // namespace

void sample(ThreadPool& pool, const SamplingView& batch, const SampledView& sampled) {
  const SamplingKernels& table = kernels();
  const size_t scratch_bytes = size_t(table.scratch_bytes(batch.vocab));
  pool.parallel_for(batch.num_rows, [&](int row, int thread) { table.sample_row(batch, row, sampled, pool.scratch(thread, scratch_bytes)); });
}

void logprobs_of(ThreadPool& pool, const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, const int32_t* ids, int32_t n,
                 float* logprobs, uint8_t* is_argmax) {
  const SamplingKernels& table = kernels();
  // A run of equal rows costs one pass: its first entry does the work for all.
  pool.parallel_for(n, [&](int first, int) {
    if (first > 0 && rows[first] == rows[first - 1]) return;
    int last = first + 1;
    while (last < n && rows[last] == rows[first]) ++last;
    table.logprobs_row(logits + rows[first] * stride, vocab, ids + first, last - first, logprobs + first, is_argmax + first);
  });
}

void top_logprobs(ThreadPool& pool, const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, int32_t n, int32_t k,
                  int32_t* ids, float* logprobs) {
  const SamplingKernels& table = kernels();
  pool.parallel_for(n, [&](int j, int) {
    table.top_row(logits + rows[j] * stride, vocab, k, ids + int64_t(j) * k, logprobs + int64_t(j) * k);
  });
}

}  // namespace anabranch

using namespace anabranch;

extern "C" {

void anb_sample(const SamplingView* batch, const SampledView* sampled) {
  PoolLease pool;
  sample(*pool, *batch, *sampled);
}

void anb_logprobs_of(const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, const int32_t* ids, int32_t n, float* logprobs,
                     uint8_t* is_argmax) {
  PoolLease pool;
  logprobs_of(*pool, logits, stride, vocab, rows, ids, n, logprobs, is_argmax);
}

void anb_top_logprobs(const float* logits, int64_t stride, int32_t vocab, const int32_t* rows, int32_t n, int32_t k, int32_t* ids,
                      float* logprobs) {
  PoolLease pool;
  top_logprobs(*pool, logits, stride, vocab, rows, n, k, ids, logprobs);
}
}
