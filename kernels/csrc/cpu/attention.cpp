// Plans attention for one step, and runs it: which query rows are computed together, by which unit of work.
//
// A plan decides time, never bits (attention_kernel.h): spans keep what shares K and V together, units are small enough to balance the
// threads, and a span whose unit would be too large is split over its blocks.
#include "attention.h"

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention_plan.h"
#include "common.h"
#include "threads.h"

namespace anabranch {
namespace {

constexpr int kSpanRows = 256;         // query rows of a span at most: their state stays in L2
constexpr int kMinSpanRows = 24;       // not cut below this: each span widens its blocks
constexpr int kMinSplitBlocks = 4;     // a span with fewer blocks is cut by rows instead
constexpr float kBlockOverhead = 3.0f; // query rows' worth of work in reading a block
constexpr float kSerialCost = 2.0f * kBlock * 8;  // less than this is not worth waking threads

const AttentionKernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512::attention_kernels;
  if (isa() == Isa::avx2) return avx2::attention_kernels;
#endif
  return plain::attention_kernels;
}

// How attention with one (window, heads) pair is cut into units; layers that agree on both share it.
struct Schedule {
  int window = 0, num_q_heads = 0;
  std::vector<int64_t> tree_bits_at;  // where each tree's ancestor bits start
  std::vector<uint64_t> tree_bits;
  std::vector<Visible> visible;
  std::vector<Row> rows;
  std::vector<Span> spans;
  std::vector<Unit> units;
  std::vector<int32_t> num_units;
  std::unique_ptr<std::atomic<int32_t>[]> remaining;
  int64_t num_remaining = 0, num_partials = 0;
  int max_span_rows = 0;
  bool is_serial = false;
};

}  // namespace

struct AttentionPlan::State {
  KVPool kv{};
  int num_rows = 0, num_tokens = 0;
  std::vector<int32_t> q_indptr, kv_lens, page_indptr, page_ids, groups;
  std::vector<KVSlot> slots;
  std::vector<int32_t> tree_of_row;         // -1: none
  std::vector<int32_t> tree_indptr, tree_parents, tree_depth;
  std::vector<std::unique_ptr<Schedule>> schedules;  // the first `num_schedules` belong to this step
  size_t num_schedules = 0;
  float* partials = nullptr;
  int64_t partials_size = 0;
  char error[256];

  ~State() { std::free(partials); }

  const char* fail(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, sizeof(error), format, arguments);
    va_end(arguments);
    return error;
  }
  int num_new(int row) const { return q_indptr[row + 1] - q_indptr[row]; }
  int tree_size(int row) const { return tree_of_row[row] < 0 ? 0 : tree_indptr[tree_of_row[row] + 1] - tree_indptr[tree_of_row[row]]; }
  const int32_t* pages(int row) const { return page_ids.data() + page_indptr[row]; }
};

namespace {

using State = AttentionPlan::State;

// ---- Taking in a step ----

const char* check_rows(State& s, const StepView& step) {
  if (step.num_rows < 0 || step.num_tokens < 0) return s.fail("a step cannot have %d rows of %d tokens", step.num_rows, step.num_tokens);
  if (step.q_indptr[0] != 0 || step.q_indptr[step.num_rows] != step.num_tokens)
    return s.fail("q_indptr must run from 0 to the %d tokens, got %d to %d", step.num_tokens, step.q_indptr[0], step.q_indptr[step.num_rows]);
  if (step.page_indptr[0] != 0 || step.page_indptr[step.num_rows] != step.num_page_ids)
    return s.fail("page_indptr must run from 0 to the %d page ids, got %d to %d", step.num_page_ids, step.page_indptr[0],
                  step.page_indptr[step.num_rows]);
  for (int r = 0; r < step.num_rows; ++r) {
    const int64_t num_new = int64_t(step.q_indptr[r + 1]) - step.q_indptr[r];
    const int64_t num_pages = int64_t(step.page_indptr[r + 1]) - step.page_indptr[r];
    if (num_new < 0 || num_pages < 0) return s.fail("row %d: q_indptr and page_indptr must not decrease", r);
    if (step.kv_lens[r] < num_new) return s.fail("row %d: kv_len %d is less than its %d new tokens", r, step.kv_lens[r], int(num_new));
    if (num_pages * s.kv.page_size < step.kv_lens[r])
      return s.fail("row %d: %d pages of %d slots cannot hold kv_len %d", r, int(num_pages), s.kv.page_size, step.kv_lens[r]);
  }
  for (int i = 0; i < step.num_page_ids; ++i)
    if (step.page_ids[i] < 0 || step.page_ids[i] >= s.kv.num_pages)
      return s.fail("page id %d is outside the pool of %lld pages", step.page_ids[i], static_cast<long long>(s.kv.num_pages));
  return nullptr;
}

const char* take_trees(State& s, const StepView& step) {
  s.tree_of_row.assign(step.num_rows, -1);
  s.tree_indptr.assign(1, 0);
  s.tree_parents.clear();
  s.tree_depth.clear();
  for (int t = 0; t < step.num_trees; ++t) {
    const int row = step.tree_rows[t], first = step.tree_indptr[t], size = step.tree_indptr[t + 1] - first;
    if (row < 0 || row >= step.num_rows) return s.fail("tree %d: row %d is outside the %d rows", t, row, step.num_rows);
    if (s.tree_of_row[row] >= 0) return s.fail("row %d has two trees", row);
    if (size < 1 || size > s.num_new(row)) return s.fail("row %d: a tree of %d tokens does not fit its %d new tokens", row, size, s.num_new(row));
    for (int i = 0; i < size; ++i) {
      const int parent = step.tree_parents[first + i];
      if (parent < -1 || parent >= i) return s.fail("row %d: tree token %d has parent %d, which must be in [-1, %d)", row, i, parent, i);
      s.tree_parents.push_back(parent);
      s.tree_depth.push_back(parent < 0 ? 0 : s.tree_depth[s.tree_indptr.back() + parent] + 1);
    }
    s.tree_of_row[row] = t;
    s.tree_indptr.push_back(int(s.tree_parents.size()));
  }
  return nullptr;
}

const char* take_groups(State& s, const StepView& step) {
  s.groups.clear();
  int previous_end = 0;
  for (int g = 0; g < step.num_groups; ++g) {
    const int first = step.groups[3 * g], last = step.groups[3 * g + 1], shared = step.groups[3 * g + 2];
    if (first < previous_end || first > last || last > step.num_rows)
      return s.fail("group %d: rows [%d, %d) must be ascending, disjoint and among %d rows", g, first, last, step.num_rows);
    if (shared < 0 || shared % s.kv.page_size != 0) return s.fail("group %d: %d shared tokens are not whole pages of %d", g, shared, s.kv.page_size);
    for (int r = first; r < last; ++r) {
      if (s.kv_lens[r] - s.num_new(r) < shared)
        return s.fail("group %d: row %d has %d slots before its new tokens, fewer than the %d shared", g, r, s.kv_lens[r] - s.num_new(r), shared);
      if (memcmp(s.pages(r), s.pages(first), shared / s.kv.page_size * sizeof(int32_t)) != 0)
        return s.fail("group %d: rows %d and %d differ in their first %d pages", g, first, r, shared / s.kv.page_size);
    }
    s.groups.insert(s.groups.end(), {first, last, shared});
    previous_end = last;
  }
  return nullptr;
}

void place_slots(State& s) {
  s.slots.resize(s.num_tokens);
  for (int r = 0; r < s.num_rows; ++r)
    for (int i = 0, n = s.num_new(r); i < n; ++i) {
      const int slot = s.kv_lens[r] - n + i;
      s.slots[s.q_indptr[r] + i] = {s.pages(r)[slot / s.kv.page_size], slot % s.kv.page_size};
    }
}

// ---- What each token sees ----

// Ancestor-or-self bits of every tree token, less than `window` levels up.
void mark_ancestors(const State& s, Schedule& schedule) {
  const int window = schedule.window;
  schedule.tree_bits_at.clear();
  schedule.tree_bits.clear();
  for (size_t t = 0; t + 1 < s.tree_indptr.size(); ++t) {
    const int first = s.tree_indptr[t], size = s.tree_indptr[t + 1] - first, words = (size + 63) / 64;
    schedule.tree_bits_at.push_back(int64_t(schedule.tree_bits.size()));
    schedule.tree_bits.resize(schedule.tree_bits.size() + size_t(size) * words);
    uint64_t* bits = schedule.tree_bits.data() + schedule.tree_bits_at.back();
    for (int i = 0; i < size; ++i)
      for (int j = i; j >= 0; j = s.tree_parents[first + j]) {
        if (window > 0 && s.tree_depth[first + i] - s.tree_depth[first + j] >= window) break;
        bits[size_t(i) * words + j / 64] |= uint64_t(1) << (j % 64);
      }
  }
}

void see(const State& s, Schedule& schedule) {
  const int window = schedule.window;
  schedule.visible.resize(s.num_tokens);
  schedule.rows.resize(s.num_rows);
  for (int r = 0; r < s.num_rows; ++r) {
    const int first_token = s.q_indptr[r], n = s.num_new(r), tree_size = s.tree_size(r), base = s.kv_lens[r] - tree_size;
    Row& row = schedule.rows[r];
    row = {s.pages(r), first_token, first_token + n, INT_MAX, 0, s.kv_lens[r]};
    for (int i = 0; i < n; ++i) {
      const int slot = s.kv_lens[r] - n + i, in_tree = slot - base;
      Visible v{0, slot + 1, slot + 1, nullptr};
      int position = slot;
      if (in_tree >= 0) {
        const int tree = s.tree_of_row[r];
        position = base + s.tree_depth[s.tree_indptr[tree] + in_tree];
        v.base = base;
        v.tree = schedule.tree_bits.data() + schedule.tree_bits_at[tree] + int64_t(in_tree) * ((tree_size + 63) / 64);
      }
      if (window > 0) v.lo = std::max(0, position - window + 1);
      schedule.visible[first_token + i] = v;
      row.first_block = std::min(row.first_block, std::min(v.lo, v.base) / kBlock);
      row.last_block = std::max(row.last_block, (v.hi + kBlock - 1) / kBlock);
    }
  }
}

// ---- Cutting into spans and units ----

struct Cutter {
  const State& s;
  Schedule& schedule;
  int heads;   // query heads per KV head
  int max_tokens() const { return std::max(1, kSpanRows / heads); }

  // A token's work on blocks [first, last), in (query row, slot) pairs.
  float token_cost(const Visible& v, int first, int last) const {
    return float(heads) * float(std::max(0, std::min(v.hi, last * kBlock) - std::max(v.lo, first * kBlock)));
  }

  int first_own_block(const Span& span, const Row& row) const { return std::max(row.first_block, span.shared_blocks); }

  float row_cost(const Span& span, int r, int first, int last) const {
    const Row& row = schedule.rows[r];
    float cost = kBlockOverhead * kBlock * float(std::max(0, last - first));
    for (int t = std::max(span.first_token, row.first_token); t < std::min(span.last_token, row.last_token); ++t)
      cost += token_cost(schedule.visible[t], first, last);
    return cost;
  }

  float shared_cost(const Span& span, int first, int last) const {
    float cost = kBlockOverhead * kBlock * float(std::max(0, last - first));
    for (int t = span.first_token; t < span.last_token; ++t) cost += token_cost(schedule.visible[t], first, last);
    return cost;
  }

  float whole_cost(const Span& span) const {
    float cost = shared_cost(span, span.first_block, span.shared_blocks);
    for (int r = span.first_row; r < span.last_row; ++r) cost += row_cost(span, r, first_own_block(span, schedule.rows[r]), schedule.rows[r].last_block);
    return cost;
  }

  Span make_span(int first_token, int last_token, int first_row, int last_row, int shared_blocks) const {
    while (schedule.rows[first_row].last_token <= first_token) ++first_row;
    while (schedule.rows[last_row - 1].first_token >= last_token) --last_row;
    Span span{first_token, last_token, first_row, last_row, INT_MAX, 0, shared_blocks, 0, 0};
    for (int r = first_row; r < last_row; ++r) {
      span.first_block = std::min(span.first_block, schedule.rows[r].first_block);
      span.last_block = std::max(span.last_block, schedule.rows[r].last_block);
    }
    return span;
  }

  void add_spans(int first_row, int last_row, int shared_blocks) {
    const int first = s.q_indptr[first_row], last = s.q_indptr[last_row];
    const int pieces = (last - first + max_tokens() - 1) / max_tokens();
    for (int p = 0; p < pieces; ++p) {
      const int from = first + int(int64_t(last - first) * p / pieces), to = first + int(int64_t(last - first) * (p + 1) / pieces);
      schedule.spans.push_back(make_span(from, to, first_row, last_row, shared_blocks));
    }
  }

  // Spans in token order: groups with shared blocks together, every other row alone.
  void cut_rows() {
    int row = 0;
    const auto add_alone = [&](int end) {
      for (; row < end; ++row)
        if (s.num_new(row) > 0) add_spans(row, row + 1, 0);
    };
    for (size_t g = 0; g < s.groups.size(); g += 3) {
      const int first = s.groups[g], last = s.groups[g + 1], shared_blocks = s.groups[g + 2] / kBlock;
      if (shared_blocks == 0 || last - first < 2 || s.q_indptr[first] == s.q_indptr[last]) continue;
      add_alone(first);
      add_spans(first, last, shared_blocks);
      row = last;
    }
    add_alone(s.num_rows);
  }

  void add_unit(int span, UnitKind kind, int row, int first_block, int last_block, float cost) {
    for (int h = 0; h < s.kv.num_kv_heads; ++h) schedule.units.push_back({span, h, kind, row, first_block, last_block, cost});
    ++schedule.num_units[span];
  }

  // One unit per few blocks, each about `target` large.
  void split(int index, float target) {
    Span& span = schedule.spans[index];
    span.is_split = 1;
    span.partial_index = schedule.num_partials;
    schedule.num_partials += int64_t(span.last_block - span.first_block) * (span.last_token - span.first_token) * heads * s.kv.num_kv_heads;
    const auto cut = [&](UnitKind kind, int row, int first, int last, float cost) {
      if (first >= last) return;
      const int pieces = std::clamp(int(cost / target) + 1, 1, last - first);
      for (int p = 0; p < pieces; ++p) {
        const int from = first + (last - first) * p / pieces, to = first + (last - first) * (p + 1) / pieces;
        add_unit(index, kind, row, from, to, cost * float(to - from) / float(last - first));
      }
    };
    cut(UnitKind::shared, -1, span.first_block, span.shared_blocks, shared_cost(span, span.first_block, span.shared_blocks));
    for (int r = span.first_row; r < span.last_row; ++r) {
      const int first = first_own_block(span, schedule.rows[r]), last = schedule.rows[r].last_block;
      cut(UnitKind::own, r, first, last, row_cost(span, r, first, last));
    }
  }

  bool can_cut(const Span& span) const { return (span.last_token - span.first_token) * heads >= 2 * kMinSpanRows; }

  void cut_units(int num_threads) {
    std::vector<float> costs;
    float total = 0;
    for (const Span& span : schedule.spans) total += costs.emplace_back(whole_cost(span));
    total *= float(s.kv.num_kv_heads);
    schedule.is_serial = num_threads == 1 || total < kSerialCost;
    const float target = schedule.is_serial ? total : total / float(4 * num_threads);
    for (size_t i = 0; i < schedule.spans.size(); ++i) {
      const int num_blocks = schedule.spans[i].last_block - schedule.spans[i].first_block;
      while (costs[i] > target && num_blocks < kMinSplitBlocks && can_cut(schedule.spans[i])) {
        const Span whole = schedule.spans[i];
        const int middle = (whole.first_token + whole.last_token) / 2;
        schedule.spans[i] = make_span(whole.first_token, middle, whole.first_row, whole.last_row, whole.shared_blocks);
        schedule.spans.push_back(make_span(middle, whole.last_token, whole.first_row, whole.last_row, whole.shared_blocks));
        costs[i] = whole_cost(schedule.spans[i]);
        costs.push_back(whole_cost(schedule.spans.back()));
      }
    }
    schedule.num_units.assign(schedule.spans.size(), 0);
    for (size_t i = 0; i < schedule.spans.size(); ++i) {
      if (costs[i] > target && schedule.spans[i].last_block - schedule.spans[i].first_block > 1) split(int(i), target);
      else add_unit(int(i), UnitKind::whole, -1, 0, 0, costs[i]);
    }
  }

  // The pool deals tasks to threads in equal contiguous runs: give each run about the same work, largest first.
  void order_units(int num_threads) {
    std::vector<Unit>& units = schedule.units;
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
    if (schedule.is_serial) return;
    std::vector<std::vector<Unit>> hands(num_threads);
    for (size_t i = 0; i < units.size(); ++i) {
      const size_t turn = i % size_t(2 * num_threads), hand = turn < size_t(num_threads) ? turn : size_t(2 * num_threads) - 1 - turn;
      hands[hand].push_back(units[i]);
    }
    units.clear();
    for (const auto& hand : hands) units.insert(units.end(), hand.begin(), hand.end());
  }
};

void build(const State& s, Schedule& schedule, int num_threads) {
  schedule.spans.clear();
  schedule.units.clear();
  schedule.num_partials = 0;
  mark_ancestors(s, schedule);
  see(s, schedule);
  Cutter cutter{s, schedule, schedule.num_q_heads / s.kv.num_kv_heads};
  cutter.cut_rows();
  cutter.cut_units(num_threads);
  cutter.order_units(num_threads);
  schedule.max_span_rows = 0;
  for (const Span& span : schedule.spans) schedule.max_span_rows = std::max(schedule.max_span_rows, (span.last_token - span.first_token) * cutter.heads);
  const int64_t num_counters = int64_t(schedule.spans.size()) * s.kv.num_kv_heads;
  if (num_counters > schedule.num_remaining) {
    schedule.remaining = std::make_unique<std::atomic<int32_t>[]>(num_counters);
    schedule.num_remaining = num_counters;
  }
  for (int64_t i = 0; i < num_counters; ++i) schedule.remaining[i].store(schedule.num_units[i / s.kv.num_kv_heads], std::memory_order_relaxed);
}

Schedule& schedule_for(State& s, const AttentionCall& call, int num_threads) {
  for (size_t i = 0; i < s.num_schedules; ++i)
    if (s.schedules[i]->window == call.window && s.schedules[i]->num_q_heads == call.num_q_heads) return *s.schedules[i];
  if (s.num_schedules == s.schedules.size()) s.schedules.push_back(std::make_unique<Schedule>());
  Schedule& schedule = *s.schedules[s.num_schedules++];
  schedule.window = call.window;
  schedule.num_q_heads = call.num_q_heads;
  build(s, schedule, num_threads);
  const int64_t needed = schedule.num_partials * (s.kv.padded_dim + 16);
  if (needed > s.partials_size) {
    std::free(s.partials);
    s.partials_size = needed + needed / 4;
    s.partials = static_cast<float*>(std::aligned_alloc(64, round_up(size_t(s.partials_size) * 4, 64)));
    if (s.partials == nullptr) throw std::bad_alloc();
  }
  return schedule;
}

}  // namespace

AttentionPlan::AttentionPlan() : state_(new State) {}
AttentionPlan::~AttentionPlan() = default;

const KVSlot* AttentionPlan::slots() const { return state_->slots.data(); }

const char* AttentionPlan::begin(const KVPool& kv, const StepView& step) {
  State& s = *state_;
  s.kv = kv;
  s.num_schedules = 0;
  s.num_rows = s.num_tokens = 0;
  if (const char* error = check_rows(s, step)) return error;
  s.q_indptr.assign(step.q_indptr, step.q_indptr + step.num_rows + 1);
  s.kv_lens.assign(step.kv_lens, step.kv_lens + step.num_rows);
  s.page_indptr.assign(step.page_indptr, step.page_indptr + step.num_rows + 1);
  s.page_ids.assign(step.page_ids, step.page_ids + step.num_page_ids);
  if (const char* error = take_trees(s, step)) return error;
  if (const char* error = take_groups(s, step)) return error;
  s.num_rows = step.num_rows;
  s.num_tokens = step.num_tokens;
  place_slots(s);
  return nullptr;
}

void attention(AttentionPlan& plan, ThreadPool& pool, const AttentionCall& call) {
  State& s = plan.state();
  if (s.num_tokens == 0) return;
  Schedule& schedule = schedule_for(s, call, pool.num_active());
  const Job job{&s.kv, s.kv.data + call.layer * s.kv.layer_bytes, schedule.visible.data(), schedule.rows.data(), schedule.spans.data(),
                s.partials, s.kv.padded_dim + 16, schedule.remaining.get(), schedule.num_units.data(),
                call.num_q_heads / s.kv.num_kv_heads, call.scale * 0x1.715476p+0f, call.q, call.q_stride, call.out, call.out_stride};
  const AttentionKernels& isa_kernels = kernels();
  const int64_t scratch_bytes = isa_kernels.scratch_bytes(s.kv, schedule.max_span_rows);
  const int num_units = int(schedule.units.size());
  const Unit* units = schedule.units.data();
  const auto run = [&](int i, int thread) {
    isa_kernels.run_unit(job, units[i], i + 1 < num_units ? units + i + 1 : nullptr, pool.scratch(thread, size_t(scratch_bytes)));
  };
  if (!schedule.is_serial) return pool.parallel_for(num_units, run);
  pool.parallel_for(1, [&](int, int thread) {
    for (int unit = 0; unit < num_units; ++unit) run(unit, thread);
  });
}

void write_kv(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_tokens, const float* k, int64_t k_stride, const float* v,
              int64_t v_stride) {
  kernels().write_kv(kv, layer, kv_head, slots, num_tokens, k, k_stride, v, v_stride);
}

extern "C" int64_t anb_kv_layout(KVPool* kv) {
  static constexpr int kSizes[] = {4, 2, 2, 1, 2};
  if (kv->num_pages < 1 || kv->page_size < 1 || kv->num_layers < 1 || kv->num_kv_heads < 1 || kv->head_dim < 1 || kv->type < 0 || kv->type > 4)
    return 0;
  if (kv->num_pages > INT_MAX || kv->page_size > (1 << 16) || kv->num_layers > (1 << 16) || kv->num_kv_heads > (1 << 16) || kv->head_dim > (1 << 14))
    return 0;
  const bool has_scales = kv->type == int32_t(KVType::i8) || kv->type == int32_t(KVType::i16);
  const int64_t size = kSizes[kv->type];
  kv->chunk = kv->page_size % 16 == 0 ? 16 : kv->page_size;
  kv->padded_dim = int32_t(round_up(size_t(kv->head_dim), 16));
  const int64_t v_offset = kv->page_size * kv->padded_dim * size;
  const int64_t scales = has_scales ? 8 * kv->page_size : 0;
  if (2 * v_offset + scales > INT_MAX) return 0;
  kv->v_offset = int32_t(v_offset);
  kv->scale_offset = int32_t(2 * v_offset);
  kv->head_bytes = int64_t(round_up(size_t(2 * v_offset + scales), 64));
  kv->layer_bytes = kv->head_bytes * kv->num_kv_heads;
  int64_t total;
  if (__builtin_mul_overflow(kv->layer_bytes, int64_t(kv->num_layers), &kv->page_bytes) || __builtin_mul_overflow(kv->page_bytes, kv->num_pages, &total))
    return 0;
  return total;
}

}  // namespace anabranch

// ---- C interface, for tests and for callers that keep their own loop ----

using namespace anabranch;

extern "C" {

void* anb_attention_plan() { return new (std::nothrow) AttentionPlan; }
void anb_attention_plan_free(void* plan) { delete static_cast<AttentionPlan*>(plan); }

const char* anb_attention_begin(void* plan, const KVPool* kv, const StepView* step) {
  try {
    return static_cast<AttentionPlan*>(plan)->begin(*kv, *step);
  } catch (const std::bad_alloc&) {
    return "not enough memory to plan the step";
  }
}

// k, v [num_tokens][num_kv_heads * head_dim]: the KV of every new token of the begun step.
void anb_attention_write(void* plan, const KVPool* kv, int32_t layer, const float* k, const float* v) {
  const int64_t stride = int64_t(kv->num_kv_heads) * kv->head_dim;
  const State& s = static_cast<AttentionPlan*>(plan)->state();
  for (int h = 0; h < kv->num_kv_heads; ++h)
    write_kv(*kv, layer, h, s.slots.data(), s.num_tokens, k + h * kv->head_dim, stride, v + h * kv->head_dim, stride);
}

// Returns 0, or 1 without memory.
int32_t anb_attention(void* plan, const AttentionCall* call) {
  try {
    PoolLease pool;
    attention(*static_cast<AttentionPlan*>(plan), *pool, *call);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
}
