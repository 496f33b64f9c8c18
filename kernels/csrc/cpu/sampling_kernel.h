// Sampling of one row of logits, once per instruction set. Rules: sampling.h.
//
// The vocabulary is walked in blocks of kRun tokens, ascending. Greedy is one pass; a plain draw is two (largest, weights summed per block)
// and a look into one block. top-k, top-p and min-p first collect the candidates above a threshold, lowered until they provably hold all
// that can be kept, then find the last one kept by quickselect: the whole vocabulary is never sorted.
#pragma once

#include "mathlib.h"
#include "sampling.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

constexpr int kRun = 512;

struct Candidate {
  float logit, weight;
  int32_t id;
};

// Scratch of one row.
struct Scratch {
  float* edited;          // [vocab]
  double* run_sums;       // [runs]
  Candidate* kept;        // [vocab], ids ascending
  Candidate* order;       // [vocab], for selection
};

ANB_INLINE int num_runs(int n) { return (n + kRun - 1) / kRun; }

int64_t scratch_bytes(int32_t vocab) {
  const int64_t n = vocab + kLanes;
  return 8 * (num_runs(vocab) + 1) + n * 4 + 2 * n * int64_t(sizeof(Candidate)) + 64;
}

Scratch lay_out(void* memory, int vocab) {
  const int64_t n = vocab + kLanes;
  Scratch s;
  s.run_sums = (double*)memory;
  s.edited = (float*)(s.run_sums + num_runs(vocab) + 1);
  s.kept = (Candidate*)(s.edited + n);
  s.order = s.kept + n;
  return s;
}

// Sixteen logits from `i` on; -inf at and beyond `n`.
ANB_INLINE vf load_logits(const float* x, int i, int n) {
  if (i + kLanes <= n) return load(x + i);
  float rest[kLanes];
  for (int j = 0; j < kLanes; ++j) rest[j] = i + j < n ? x[i + j] : -kInfinity;
  return load(rest);
}

// ---- Largest ----

struct Largest {
  float value;
  int32_t id;         // the lowest that has it; -1 where nothing is above -inf
  bool is_finite;     // no NaN, no infinity
};

// `must_be_finite`: -inf (a ban, in edited logits) is no fault otherwise.
template <bool kMustBeFinite>
Largest find_largest(const float* x, int n) {
  float best = -kInfinity;
  int best_run = -1;
  vf fault = zero();  // becomes NaN at a NaN, or at an infinity that matters
  for (int first = 0; first < n; first += kRun) {
    const int last = first + kRun < n ? first + kRun : n;
    vf high[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
    int i = first;
    for (; i + 4 * kLanes <= last; i += 4 * kLanes)
      for (int j = 0; j < 4; ++j) {
        const vf v = load(x + i + j * kLanes);
        high[j] = max(high[j], v);
        if (kMustBeFinite) fault = fma(v, zero(), fault);
        else fault = add(fault, sub(max(zero(), v), max(zero(), v)));
      }
    for (; i < last; i += kLanes) {
      const vf v = load_logits(x, i, last);
      high[0] = max(high[0], v);
      const vf seen = i + kLanes <= last || !kMustBeFinite ? v : select((1u << (last - i)) - 1, v, zero());
      if (kMustBeFinite) fault = fma(seen, zero(), fault);
      else fault = add(fault, sub(max(zero(), seen), max(zero(), seen)));
    }
    const float top = hmax(max(max(high[0], high[1]), max(high[2], high[3])));
    if (top > best) best = top, best_run = first;
  }
  const float total = hsum(fault);
  Largest found{best, -1, total == total};
  if (best_run >= 0)
    for (int i = best_run; i < n && found.id < 0; ++i)
      if (x[i] == best) found.id = i;
  return found;
}

// ---- Raw log-probabilities ----

ANB_INLINE vf weigh(vf logits, float largest, float scale) { return exp2(mul(sub(logits, set1(largest)), set1(scale))); }

// Sum of weights of [first, last), at most kRun tokens.
ANB_INLINE double sum_run(const float* x, int first, int last, float largest, float scale) {
  vf sum[2] = {zero(), zero()};
  int i = first;
  for (; i + 2 * kLanes <= last; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) sum[j] = add(sum[j], weigh(load(x + i + j * kLanes), largest, scale));
  for (; i < last; i += kLanes) sum[0] = add(sum[0], weigh(load_logits(x, i, last), largest, scale));
  return double(hsum(add(sum[0], sum[1])));
}

double log_norm(const float* x, int n, float largest) {
  double total = 0;
  for (int first = 0; first < n; first += kRun) total += sum_run(x, first, first + kRun < n ? first + kRun : n, largest, kLog2e);
  return double(largest) + log(total);
}

ANB_INLINE bool ranks_before(float a, int32_t a_id, float b, int32_t b_id) { return a > b || (a == b && a_id < b_id); }

// The k first ranked of x, best first: ids, and their logits in `values`. A heap of the k best so far, the worst on top.
void find_top(const float* x, int n, int k, int32_t* ids, float* values) {
  const auto is_worse = [&](int a, int b) { return ranks_before(values[b], ids[b], values[a], ids[a]); };
  const auto swap = [&](int a, int b) {
    const float value = values[a];
    const int32_t id = ids[a];
    values[a] = values[b], ids[a] = ids[b];
    values[b] = value, ids[b] = id;
  };
  const auto sift_down = [&](int i, int size) {
    for (int child; (child = 2 * i + 1) < size; i = child) {
      if (child + 1 < size && is_worse(child + 1, child)) ++child;
      if (!is_worse(child, i)) return;
      swap(i, child);
    }
  };
  for (int i = 0; i < k; ++i) values[i] = x[i], ids[i] = i;
  for (int i = k / 2 - 1; i >= 0; --i) sift_down(i, k);
  for (int i = k; i < n;) {
    if (i % kLanes == 0 && i + kLanes <= n && !is_less(set1(values[0]), load(x + i))) {
      i += kLanes;
      continue;
    }
    if (x[i] > values[0]) values[0] = x[i], ids[0] = i, sift_down(0, k);  // an equal one has a higher id than those we hold
    ++i;
  }
  for (int size = k - 1; size > 0; --size) swap(0, size), sift_down(0, size);
}

void top_row(const float* logits, int32_t vocab, int32_t k, int32_t* ids, float* logprobs) {
  const Largest raw = find_largest<true>(logits, vocab);
  if (!raw.is_finite) {
    for (int i = 0; i < k; ++i) ids[i] = -1, logprobs[i] = __builtin_nanf("");
    return;
  }
  if (k == 0) return;
  find_top(logits, vocab, k, ids, logprobs);
  const double norm = log_norm(logits, vocab, raw.value);
  for (int i = 0; i < k; ++i) logprobs[i] = float(double(logprobs[i]) - norm);
}

void logprobs_row(const float* logits, int32_t vocab, const int32_t* ids, int32_t n, float* logprobs, uint8_t* is_argmax) {
  const Largest raw = find_largest<true>(logits, vocab);
  const double norm = raw.is_finite ? log_norm(logits, vocab, raw.value) : 0;
  for (int i = 0; i < n; ++i) {
    logprobs[i] = raw.is_finite ? float(double(logits[ids[i]]) - norm) : __builtin_nanf("");
    is_argmax[i] = raw.is_finite && ids[i] == raw.id;
  }
}

// ---- Edits ----

// First index of `row` or above in an ascending column.
ANB_INLINE int lower_bound(const int32_t* rows, int n, int row) {
  int low = 0;
  for (int size = n; size > 0;) {
    const int half = size / 2;
    if (rows[low + half] < row) low += half + 1, size -= half + 1;
    else size = half;
  }
  return low;
}

void copy_allowed(const SamplingView& batch, int row, const float* x, int n, float* out) {
  const uint32_t* mask = batch.mask ? batch.mask + int64_t(row) * batch.mask_words : nullptr;
  for (int i = 0; i < n; i += kLanes) {
    vf v = load_logits(x, i, n);
    if (mask) v = select(mask[i / 32] >> (i % 32) & 0xffff, v, set1(-kInfinity));
    store(out + i, v);
  }
}

ANB_INLINE float penalize(const SamplingView& batch, int row, float x, int count) {
  if (batch.repetition_penalty) x = x > 0 ? x / batch.repetition_penalty[row] : x * batch.repetition_penalty[row];
  if (batch.presence_penalty) x = x - batch.presence_penalty[row] * float(count > 0);
  if (batch.frequency_penalty) x = x - batch.frequency_penalty[row] * float(count);
  return x;
}

// The row after penalties, bias, bans and mask: the raw logits themselves where nothing edits them. Forbidden tokens are -inf; edits only
// touch tokens that are still allowed, so that no bias frees them.
const float* edit(const SamplingView& batch, int row, const float* x, int n, float* edited) {
  int penalty = lower_bound(batch.penalty_rows, batch.num_penalties, row), bias = lower_bound(batch.bias_rows, batch.num_bias, row);
  const bool has_penalty = penalty < batch.num_penalties && batch.penalty_rows[penalty] == row;
  const bool has_bias = bias < batch.num_bias && batch.bias_rows[bias] == row;
  if (!batch.mask && !has_penalty && !has_bias) return x;
  copy_allowed(batch, row, x, n, edited);
  for (; penalty < batch.num_penalties && batch.penalty_rows[penalty] == row; ++penalty) {
    const int id = batch.penalty_ids[penalty];
    if (id < n && edited[id] != -kInfinity) edited[id] = penalize(batch, row, edited[id], batch.penalty_counts[penalty]);
  }
  for (; bias < batch.num_bias && batch.bias_rows[bias] == row; ++bias) {
    const int id = batch.bias_ids[bias];
    if (id < n && edited[id] != -kInfinity) edited[id] += batch.bias_values[bias];
  }
  return edited;
}

// ---- Random numbers: Philox4x32-10 (Salmon et al. 2011) ----

double uniform(uint64_t seed, uint64_t path, uint64_t position) {
  uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(path), uint32_t(path >> 32)};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t(c[0]) * 0xD2511F53u, p1 = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
    memcpy(c, next, sizeof(c));
  }
  return (double(c[0] >> 5) * 0x1p26 + double(c[1] >> 6)) * 0x1p-53;
}

// ---- Drawing ----

// From all tokens: the lowest id at which the running sum exceeds draw * total.
int draw_from_all(const float* x, int n, float largest, float scale, double draw, double* run_sums) {
  double total = 0;
  for (int r = 0; r < num_runs(n); ++r) {
    run_sums[r] = sum_run(x, r * kRun, (r + 1) * kRun < n ? (r + 1) * kRun : n, largest, scale);
    total += run_sums[r];
  }
  const double target = draw * total;
  double sum = 0;
  int run = 0, last_id = -1;
  for (; run + 1 < num_runs(n) && !(sum + run_sums[run] > target); ++run) sum += run_sums[run];
  // The sum of a run in float and token by token differ in the last bits: a draw that falls between them goes to the run's last token.
  for (int i = run * kRun; i < n && i < (run + 1) * kRun; i += kLanes) {
    float weights[kLanes];
    store(weights, weigh(load_logits(x, i, n), largest, scale));
    for (int j = 0; j < kLanes; ++j) {
      if (weights[j] == 0.0f) continue;
      last_id = i + j;
      sum += double(weights[j]);
      if (sum > target) return last_id;
    }
  }
  return last_id;
}

int draw_from(const Candidate* kept, int n, double draw) {
  double total = 0, sum = 0;
  for (int i = 0; i < n; ++i) total += double(kept[i].weight);
  const double target = draw * total;
  int last_id = kept[0].id;
  for (int i = 0; i < n; ++i) {
    if (kept[i].weight == 0.0f) continue;
    last_id = kept[i].id;
    sum += double(kept[i].weight);
    if (sum > target) break;
  }
  return last_id;
}

// ---- top-k, top-p, min-p ----

ANB_INLINE bool ranks_before(const Candidate& a, const Candidate& b) { return ranks_before(a.logit, a.id, b.logit, b.id); }

// Candidates with scaled distance to the largest of at most `reach` (in powers of two), ids ascending. Returns how many.
int collect(const float* x, int n, float largest, float scale, float reach, Candidate* kept) {
  int count = 0;
  for (int i = 0; i < n; i += kLanes) {
    const vf logits = load_logits(x, i, n), distance = mul(sub(logits, set1(largest)), set1(scale));
    uint32_t mask = ~is_less(distance, set1(-reach)) & 0xffff;
    if (!mask) continue;
    float weights[kLanes], values[kLanes];
    store(weights, exp2(distance));
    store(values, logits);
    for (; mask; mask &= mask - 1) {
      const int j = __builtin_ctz(mask);
      kept[count++] = {values[j], weights[j], i + j};
    }
  }
  return count;
}

double sum_weights(const Candidate* kept, int n) {
  double total = 0;
  for (int i = 0; i < n; ++i) total += double(kept[i].weight);
  return total;
}

// The last candidate, in rank order, of the shortest run that holds `count` candidates or weighs `mass`, whichever comes first. Quickselect;
// `order` is reordered.
Candidate find_last_kept(Candidate* order, int n, int64_t count, double mass) {
  int low = 0, high = n;
  uint32_t random = 1;
  while (high - low > 1) {
    random = random * 1664525u + 1013904223u;
    const Candidate pivot = order[low + int(uint64_t(random) * uint64_t(high - low) >> 32)];
    int split = low;  // order[low, split) rank before the pivot
    double before = 0;
    for (int i = low; i < high; ++i) {
      if (!ranks_before(order[i], pivot)) continue;
      const Candidate better = order[i];
      order[i] = order[split];
      order[split++] = better;
      before += double(better.weight);
    }
    if (split > low && (split - low >= count || before >= mass)) {
      high = split;
      continue;
    }
    count -= split - low;
    mass -= before;
    if (count <= 1 || double(pivot.weight) >= mass) return pivot;
    // The pivot itself is kept as well: it moves to the front of the rest, and out.
    for (int i = split; i < high; ++i)
      if (order[i].id == pivot.id) {
        order[i] = order[split];
        order[split] = pivot;
        break;
      }
    if (split + 1 == high) return pivot;
    count -= 1;
    mass -= double(pivot.weight);
    low = split + 1;
  }
  return order[low];
}

// Drops what ranks after `last`; order stays. Returns how many are left.
int keep_through(Candidate* kept, int n, const Candidate& last) {
  int count = 0;
  for (int i = 0; i < n; ++i)
    if (!ranks_before(last, kept[i])) kept[count++] = kept[i];
  return count;
}

int keep_heavy(Candidate* kept, int n, float least) {
  int count = 0;
  for (int i = 0; i < n; ++i)
    if (kept[i].weight >= least) kept[count++] = kept[i];
  return count;
}

struct Filter {
  int top_k;     // 0: off
  float top_p;   // >= 1: off
  float min_p;   // <= 0: off
};

// What top-k, top-p and min-p keep, ids ascending. Returns how many, at least one.
int filter(const float* x, int n, float largest, float scale, const Filter& f, const Scratch& s) {
  const bool has_p = f.top_p < 1.0f;
  double mass = 0;  // to reach, where there is no top-k
  if (has_p && !f.top_k) {
    for (int r = 0; r < num_runs(n); ++r) mass += sum_run(x, r * kRun, (r + 1) * kRun < n ? (r + 1) * kRun : n, largest, scale);
    mass *= double(f.top_p);
  }
  int count = 0;
  static constexpr float reaches[] = {8.0f, 16.0f, 32.0f, -kMinExp2};  // the last holds every token that weighs anything
  for (float reach : reaches) {
    count = collect(x, n, largest, scale, reach, s.kept);
    if (f.top_k ? count >= f.top_k : has_p ? sum_weights(s.kept, count) >= mass : exp2_scalar(-reach) < f.min_p) break;
  }
  if (f.top_k && f.top_k < count) {
    memcpy(s.order, s.kept, sizeof(Candidate) * size_t(count));
    count = keep_through(s.kept, count, find_last_kept(s.order, count, f.top_k, __builtin_inf()));
  }
  if (has_p) {
    if (f.top_k) mass = sum_weights(s.kept, count) * double(f.top_p);
    memcpy(s.order, s.kept, sizeof(Candidate) * size_t(count));
    count = keep_through(s.kept, count, find_last_kept(s.order, count, n, mass));
  }
  return f.min_p > 0.0f ? keep_heavy(s.kept, count, f.min_p < 1.0f ? f.min_p : 1.0f) : count;
}

int choose(const SamplingView& batch, int row, const float* x, int n, const Largest& largest, const Scratch& s) {
  if (!largest.is_finite || largest.id < 0) return -1;
  const float temperature = batch.temperature[row];
  if (temperature < kMinTemperature) return largest.id;
  const float scale = kLog2e / temperature;
  const double draw = uniform(batch.seeds[row], batch.paths[row], batch.positions[row]);
  const int top_k = batch.top_k[row] >= n || batch.top_k[row] < 0 ? 0 : batch.top_k[row];
  const Filter f{top_k, batch.top_p[row], batch.min_p[row]};
  if (!f.top_k && f.top_p >= 1.0f && f.min_p <= 0.0f) return draw_from_all(x, n, largest.value, scale, draw, s.run_sums);
  return draw_from(s.kept, filter(x, n, largest.value, scale, f, s), draw);
}

void sample_row(const SamplingView& batch, int32_t row, const SampledView& sampled, void* memory) {
  const Scratch s = lay_out(memory, batch.vocab);
  const float* raw = batch.logits + row * batch.stride;
  const int n = batch.vocab_limit > 0 && batch.vocab_limit < batch.vocab ? batch.vocab_limit : batch.vocab;
  const Largest within = find_largest<true>(raw, n), beyond = find_largest<true>(raw + n, batch.vocab - n);
  int id = -1;
  if (within.is_finite && beyond.is_finite) {
    const float* x = edit(batch, row, raw, n, s.edited);
    id = choose(batch, row, x, n, x == raw ? within : find_largest<false>(x, n), s);
  }
  sampled.token_ids[row] = id;
  sampled.logprobs[row] = __builtin_nanf("");
  const int num_top = batch.num_top_logprobs[row];
  if (num_top < 0 || id < 0) return;
  const double norm = log_norm(raw, batch.vocab, within.value > beyond.value ? within.value : beyond.value);
  sampled.logprobs[row] = float(double(raw[id]) - norm);
  int32_t* top_ids = sampled.top_ids + row * sampled.max_top;
  float* top_logprobs = sampled.top_logprobs + row * sampled.max_top;
  if (num_top > 0) find_top(raw, batch.vocab, num_top, top_ids, top_logprobs);
  for (int i = 0; i < num_top; ++i) top_logprobs[i] = float(double(top_logprobs[i]) - norm);
}

}  // namespace

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {scratch_bytes, sample_row, logprobs_row, top_row};

}  // namespace ANB_ISA
}  // namespace anabranch
