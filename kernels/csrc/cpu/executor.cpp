// Replays a recorded forward for one step.
//
// Everything but attention works on each row alone. So with enough rows a thread takes a block of them through all operations from one
// attention to the next, without a barrier, and their values never leave its cache. With few rows weights would be read more often than
// that is worth: each operation then is one or two parallel loops over (block of rows, panels of columns). Either way a row's arithmetic
// is the same, and only which thread did it differs.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cpu_api.h"
#include "operand.h"
#include "rope.h"
#include "threads.h"

namespace anabranch {

namespace {

constexpr int kMaxPanels = 32;        // of one task
constexpr int kRedundantRows = 2;     // up to so many, each thread prepares all rows for itself, which is cheaper than a barrier
constexpr int kOwnRows = 16;          // of a thread at least, or operations are split by panels
constexpr int kOwnRowsAtMost = 128;   // of a thread at a time: what a layer knows about them stays in the second-level cache
constexpr int kMaxPositions = 1 << 26;
constexpr int kLogitPanels = 8;       // panels per task of the output projection
constexpr int kFetchedRows = 32;      // up to so many, a task fetches ahead what it will write
constexpr int kPreparedRows = std::max(kRedundantRows, kOwnRowsAtMost);

// Memory that grows and is kept.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  uint8_t* resize(size_t num_bytes) {
    if (num_bytes > capacity_) {
      std::free(data_);
      capacity_ = 0;
      const size_t wanted = round_up(num_bytes + num_bytes / 4, 4096);
      data_ = static_cast<uint8_t*>(std::aligned_alloc(4096, wanted));
      if (data_ == nullptr) throw std::bad_alloc();
      capacity_ = wanted;
    }
    return data_;
  }
  uint8_t* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : data_(other.data_), capacity_(other.capacity_) { other.data_ = nullptr, other.capacity_ = 0; }

 private:
  uint8_t* data_ = nullptr;
  size_t capacity_ = 0;
};

struct Activations {
  int32_t width;
  bool is_gated;
  Buffer memory;
};

struct PanelRange {
  int first, count;
};

struct Rows {
  int first, count;
};

// How the columns of attention_input are divided: a unit is the fewest panels that hold whole heads, of q or of both k and v.
struct HeadUnits {
  int panels, heads;  // of one unit
  int q_panels, kv_panels, q_units, kv_units;

  explicit HeadUnits(const OpSpec& op) : heads(1) {
    while (heads * op.head_dim % kPanelColumns != 0) ++heads;
    panels = heads * op.head_dim / kPanelColumns;
    q_panels = ceil_div(op.num_q_heads * op.head_dim, kPanelColumns), kv_panels = ceil_div(op.num_kv_heads * op.head_dim, kPanelColumns);
    q_units = ceil_div(q_panels, panels), kv_units = ceil_div(kv_panels, panels);
  }
  int num_units() const { return q_units + kv_units; }
};

}  // namespace

struct Program {
  KVPool kv;
  std::vector<Activations> buffers;
  std::vector<OpSpec> ops;
  size_t last_attention = SIZE_MAX;  // index into ops
  std::vector<RopeTable*> ropes;  // each once
  AttentionPlan plan;
  Buffer prepared;
  uint64_t spent_ns[kNumOpKinds] = {};
  std::string error;
};

namespace {

// What a task will write when its sums are ready: `num_rows` pieces of `bytes` each. Asked for before it multiplies, they arrive meanwhile,
// mostly from the cache of another core. With many rows they would push out what is multiplied, and come in sequence anyway.
void fetch_targets(const void* first, size_t stride_bytes, size_t bytes, int num_rows) {
  if (num_rows > kFetchedRows) return;
  const auto* p = static_cast<const uint8_t*>(first);
  for (int r = 0; r < num_rows; ++r, p += stride_bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1, 3);
  }
}

// The same for the KV of one head: K of a slot is spread over the whole chunk of slots that it belongs to.
void fetch_kv(const KVPool& kv, int layer, int kv_head, const KVSlot* slots, int num_rows) {
  const size_t chunk_bytes = size_t(kv.v_offset) * kv.chunk / kv.page_size, row_bytes = size_t(kv.v_offset) / kv.page_size;
  for (int r = 0; r < num_rows; ++r) {
    const uint8_t* head = kv.data + layer * kv.layer_bytes + slots[r].page_id * kv.page_bytes + kv_head * kv.head_bytes;
    fetch_targets(head + slots[r].offset / kv.chunk * chunk_bytes, 0, chunk_bytes, 1);
    fetch_targets(head + kv.v_offset + slots[r].offset * row_bytes, 0, row_bytes, 1);
  }
}

// One run of a program.
class Run {
 public:
  Run(Program& program, const StepArgs& step, ThreadPool& pool) : program_(program), step_(step), pool_(pool), num_tokens_(step.view.num_tokens) {
    for (Activations& b : program.buffers) {
      const size_t row = b.is_gated ? std::max(gated_bytes(b.width, true), gated_bytes(b.width, false)) : size_t(b.width) * 4;
      b.memory.resize(row * num_tokens_);
    }
    for (const OpSpec& op : program.ops) {
      if (op.matrix != nullptr) widest_ = std::max({widest_, round_up(size_t(op.matrix->k) * 4, 64), operand_bytes(*op.matrix)});
    }
    for (int thread = 0; thread < pool.num_threads(); ++thread) memory(thread);  // here, where it may fail
  }

  void run() {
    for (size_t i = 0; i < program_.ops.size();) {
      if (i == program_.last_attention && step_.num_logits == 0) return;  // the KV is written, and that was all
      const uint64_t start = monotonic_ns();
      size_t end = end_of_segment(i);
      if (end - i > 1 && num_tokens_ >= kOwnRows * pool_.num_active()) {
        by_rows(i, end);
        share_time(monotonic_ns() - start);
      } else {
        run_op(program_.ops[i]);
        program_.spent_ns[int(program_.ops[i].kind)] += monotonic_ns() - start;
        if (i == program_.last_attention) keep_logit_rows(i);
        end = i + 1;
      }
      i = end;
    }
  }

 private:
  static size_t gated_bytes(int width, bool is_exact) {
    return is_exact ? round_up(size_t(round_up(width, kPanelColumns)) * 4, 64) : row_stride(ceil_div(width, kGroup)) * sizeof(ActivationGroup);
  }

  float* floats(int buffer) { return program_.buffers[buffer].memory.floats(); }

  // After the last attention a row matters only to its own logits: the others are dropped.
  void keep_logit_rows(size_t last_op) {
    for (int i = 1; i < step_.num_logits; ++i) {
      if (step_.logit_rows[i] <= step_.logit_rows[i - 1]) return;
    }
    std::vector<bool> is_read(program_.buffers.size(), false);
    for (size_t i = last_op + 1; i < program_.ops.size(); ++i) {
      const OpSpec& op = program_.ops[i];
      is_read[op.source] = true;
      if (op.kind == OpKind::linear_add) is_read[op.target] = true;
    }
    for (size_t b = 0; b < is_read.size(); ++b) {
      if (!is_read[b] || program_.buffers[b].is_gated) continue;  // what is gated is written after this
      const size_t width = program_.buffers[b].width;
      float* rows = floats(int(b));
      for (int i = 0; i < step_.num_logits; ++i) std::memmove(rows + i * width, rows + step_.logit_rows[i] * width, width * 4);
    }
    num_tokens_ = step_.num_logits;
    rows_are_logits_ = true;
  }

  // --- the two ways to divide work ------------------------------------------------------------------------------------------------

  // The operations from `first` on that work on rows alone end there. The output projection stays outside: it is the widest by far.
  size_t end_of_segment(size_t first) const {
    size_t i = first;
    while (i < program_.ops.size() && program_.ops[i].kind != OpKind::attention && program_.ops[i].kind != OpKind::logits) ++i;
    return i;
  }

  void by_rows(size_t first_op, size_t end_op) {
    const int threads = pool_.num_active(), num_blocks = int(round_up(ceil_div(num_tokens_, kOwnRowsAtMost), threads));
    pool_.parallel_for(num_blocks, [&](int task, int thread) {
      const auto from = int(int64_t(num_tokens_) * task / num_blocks), to = int(int64_t(num_tokens_) * (task + 1) / num_blocks);
      if (from == to) return;
      uint64_t before = monotonic_ns();
      for (size_t i = first_op; i < end_op; ++i) {
        const OpSpec& op = program_.ops[i];
        whole_rows(op, {from, to - from}, thread);
        const uint64_t now = monotonic_ns();
        spent_[thread].ns[int(op.kind)] += now - before;
        before = now;
      }
    });
  }

  // One operation on all columns of a few rows.
  void whole_rows(const OpSpec& op, Rows rows, int thread) {
    if (op.kind == OpKind::embed) return embed_rows(op, rows);
    Operand x = gated_operand(op, rows);
    if (x.rows == nullptr) {
      const ThreadMemory own = memory(thread);
      x = {own.prepared, operand_bytes(*op.matrix)};
      for (int r = 0; r < rows.count; ++r) prepare(op, rows.first + r, own.normed, own.prepared + r * x.row_bytes);
    }
    for (int u = 0, n = num_units(op); u < n; ++u) unit(op, x, rows, u, thread);
  }

  // Wall time of a segment, among its operations as threads spent theirs.
  void share_time(uint64_t wall_ns) {
    uint64_t sums[kNumOpKinds] = {}, total = 1;
    for (Spent& s : spent_) {
      for (int kind = 0; kind < kNumOpKinds; ++kind) sums[kind] += s.ns[kind], total += s.ns[kind];
      s = {};
    }
    for (int kind = 0; kind < kNumOpKinds; ++kind) program_.spent_ns[kind] += uint64_t(double(wall_ns) * double(sums[kind]) / double(total));
  }

  void run_op(const OpSpec& op) {
    switch (op.kind) {
      case OpKind::embed: return embed(op);
      case OpKind::attention: return attend(op);
      default: return by_panels(op);
    }
  }

  void by_panels(const OpSpec& op) {
    const Matrix& matrix = *op.matrix;
    const int num_rows = op.kind == OpKind::logits ? step_.num_logits : num_tokens_;
    if (num_rows == 0) return;
    const int block = row_block(num_rows, matrix), num_blocks = ceil_div(num_rows, block), num = num_units(op), num_tasks = num_blocks * num;
    const auto rows_of = [&](int task) { return Rows{task / num * block, std::min(block, num_rows - task / num * block)}; };
    if (gated_operand(op, {0, 0}).rows != nullptr) {
      pool_.parallel_for(num_tasks, [&](int task, int thread) {
        const Rows rows = rows_of(task);
        unit(op, gated_operand(op, rows), rows, task % num, thread);
      });
      return;
    }
    const size_t row_bytes = operand_bytes(matrix);
    if (num_rows <= kRedundantRows) {
      const int serial = ++serial_;
      pool_.parallel_for(num_tasks, [&](int task, int thread) {
        const ThreadMemory own = memory(thread);
        if (prepared_for_[thread] != serial) {
          for (int r = 0; r < num_rows; ++r) prepare(op, r, own.normed, own.prepared + r * row_bytes);
          prepared_for_[thread] = serial;
        }
        unit(op, {own.prepared, row_bytes}, rows_of(task), task % num, thread);
      });
      return;
    }
    uint8_t* prepared = program_.prepared.resize(row_bytes * num_rows);
    const int chunk = std::max(1, std::min(16, num_rows / (2 * pool_.num_threads())));
    pool_.parallel_for(ceil_div(num_rows, chunk), [&](int task, int thread) {
      float* normed = memory(thread).normed;
      for (int r = task * chunk; r < std::min(num_rows, (task + 1) * chunk); ++r) prepare(op, r, normed, prepared + r * row_bytes);
    });
    pool_.parallel_for(num_tasks, [&](int task, int thread) {
      const Rows rows = rows_of(task);
      unit(op, {prepared + rows.first * row_bytes, row_bytes}, rows, task % num, thread);
    });
  }

  // Units of an operation: pieces of its columns, in the order in which weights lie.
  int num_units(const OpSpec& op) const {
    const int num_panels = op.matrix->num_panels;
    switch (op.kind) {
      case OpKind::attention_input: return HeadUnits(op).num_units();
      case OpKind::gated_mlp_input: return num_panels / 2;
      case OpKind::logits: return ceil_div(num_panels, kLogitPanels);
      default: return num_panels;
    }
  }

  void unit(const OpSpec& op, const Operand& x, Rows rows, int index, int thread) {
    switch (op.kind) {
      case OpKind::attention_input: return heads_unit(op, x, rows, index, thread);
      case OpKind::linear_add: return add_unit(op, x, rows, index, thread);
      case OpKind::gated_mlp_input: return gated_unit(op, x, rows, index, thread);
      default: return logits_unit(op, x, rows, index, thread);
    }
  }

  // Row r normed and quantized for the operation's matrix.
  void prepare(const OpSpec& op, int r, float* normed, uint8_t* out) {
    const int row = op.kind == OpKind::logits && !rows_are_logits_ ? step_.logit_rows[r] : r;
    prepare_row(*op.matrix, floats(op.source) + size_t(row) * op.matrix->k, op.norm, op.eps, normed, out);
  }

  // What gated_mlp_input left is an operand already; null for other sources.
  Operand gated_operand(const OpSpec& op, Rows rows) const {
    const Activations& source = program_.buffers[op.source];
    if (!source.is_gated) return {nullptr, 0};
    const size_t row_bytes = gated_bytes(source.width, op.matrix->is_exact);
    return {source.memory.data() + rows.first * row_bytes, row_bytes};
  }

  void embed(const OpSpec& op) {
    const int chunk = num_tokens_ < 16 ? num_tokens_ : 8;
    pool_.parallel_for(ceil_div(num_tokens_, chunk), [&](int task, int) { embed_rows(op, {task * chunk, std::min(chunk, num_tokens_ - task * chunk)}); });
  }

  void embed_rows(const OpSpec& op, Rows rows) {
    const Table& table = *op.table;
    float* out = floats(op.target);
    for (int t = rows.first; t < rows.first + rows.count; ++t) read_row(table, step_.token_ids[t], out + size_t(t) * table.k);
  }

  // What a thread has to itself, in one piece of scratch: it never moves while an operation runs.
  struct ThreadMemory {
    float* sums;       // a Tile
    float* heads;      // K and V of a task, unpanelled
    float* normed;     // one row
    uint8_t* prepared; // kPreparedRows operand rows
  };

  ThreadMemory memory(int thread) {
    constexpr size_t sums = size_t(kMaxPanels) * kRowBlock * kPanelColumns * 4;
    auto* p = static_cast<uint8_t*>(pool_.scratch(thread, 2 * sums + widest_ * (kPreparedRows + 1)));
    uint8_t* after = p + 2 * sums;
    return {reinterpret_cast<float*>(p), reinterpret_cast<float*>(p + sums), reinterpret_cast<float*>(after), after + widest_};
  }

  // The sums of a task's panels, bias included.
  Tile multiply_panels(const Matrix& matrix, const Operand& x, int num_rows, const PanelRange* ranges, int num_ranges, int thread) {
    const Tile tile{memory(thread).sums, num_rows};
    int at = 0;
    for (int i = 0; i < num_ranges; ++i) {
      for (int p = ranges[i].first; p < ranges[i].first + ranges[i].count; ++p, ++at) {
        const bool is_last = p + 1 == ranges[i].first + ranges[i].count;
        const int next = !is_last ? p + 1 : i + 1 < num_ranges ? ranges[i + 1].first : std::min(p + 1, matrix.num_panels - 1);
        multiply(matrix, p, x, tile, at, matrix.panels[next].data);
      }
    }
    return tile;
  }

  // --- attention input -------------------------------------------------------------------------------------------------------

  // KV units are more than twice as long: they are spread among the others, and begin each stretch, so that a thread ends on a short one.
  void heads_unit(const OpSpec& op, const Operand& x, Rows rows, int index, int thread) {
    const HeadUnits units(op);
    const int before = ceil_div(index * units.kv_units, units.num_units()), after = ceil_div((index + 1) * units.kv_units, units.num_units());
    if (after > before) {
      key_value_unit(op, x, rows, before, units, thread);
    } else {
      query_unit(op, x, rows, index - before, units, thread);
    }
  }

  const float* const* angles(const OpSpec& op, int first_row) const { return op.rope->rows.data() + first_row; }

  void query_unit(const OpSpec& op, const Operand& x, Rows rows, int index, const HeadUnits& unit, int thread) {
    const PanelRange range{index * unit.panels, std::min(unit.panels, unit.q_panels - index * unit.panels)};
    const int width = op.num_q_heads * op.head_dim, first_head = index * unit.heads, num_heads = std::min(unit.heads, op.num_q_heads - first_head);
    float* q = floats(op.target) + size_t(rows.first) * width + size_t(first_head) * op.head_dim;
    fetch_targets(q, size_t(width) * 4, size_t(num_heads) * op.head_dim * 4, rows.count);
    const Tile tile = multiply_panels(*op.matrix, x, rows.count, &range, 1, thread);
    element_ops().finish_heads({tile.all(0, range.count), num_heads, op.head_dim, op.q_norm, op.eps, angles(op, rows.first),
                                op.rope->num_pairs(), q, size_t(width)});
  }

  // K and V of the same heads, so that they are written together.
  void key_value_unit(const OpSpec& op, const Operand& x, Rows rows, int index, const HeadUnits& unit, int thread) {
    const int count = std::min(unit.panels, unit.kv_panels - index * unit.panels), first = unit.q_panels + index * unit.panels;
    const PanelRange ranges[2] = {{first, count}, {first + unit.kv_panels, count}};
    const int first_head = index * unit.heads, num_heads = std::min(unit.heads, op.num_kv_heads - first_head), width = num_heads * op.head_dim;
    const KVSlot* slots = program_.plan.slots() + rows.first;
    for (int i = 0; i < num_heads && rows.count <= kFetchedRows; ++i) fetch_kv(program_.kv, op.layer, first_head + i, slots, rows.count);
    const Tile tile = multiply_panels(*op.matrix, x, rows.count, ranges, 2, thread);
    float* k = memory(thread).heads;
    float* v = k + size_t(rows.count) * width;
    element_ops().finish_heads({tile.all(0, count), num_heads, op.head_dim, op.k_norm, op.eps, angles(op, rows.first), op.rope->num_pairs(), k,
                                size_t(width)});
    element_ops().finish_heads({tile.all(count, count), num_heads, op.head_dim, nullptr, op.eps, nullptr, 0, v, size_t(width)});
    for (int i = 0; i < num_heads; ++i) {
      write_kv(program_.kv, op.layer, first_head + i, slots, rows.count, k + i * op.head_dim, width, v + i * op.head_dim, width);
    }
  }

  void attend(const OpSpec& op) {
    const int64_t width = int64_t(op.num_q_heads) * op.head_dim;
    attention(program_.plan, pool_, {op.layer, op.num_q_heads, op.scale, op.window, floats(op.source), width, floats(op.target), width});
  }

  // --- projections -----------------------------------------------------------------------------------------------------------

  void add_unit(const OpSpec& op, const Operand& x, Rows rows, int index, int thread) {
    const Matrix& matrix = *op.matrix;
    const PanelRange range{index, 1};
    const Panel& panel = matrix.panels[index];
    float* to = floats(op.target) + size_t(rows.first) * matrix.num_columns + panel.first_column;
    fetch_targets(to, size_t(matrix.num_columns) * 4, size_t(panel.num_columns) * 4, rows.count);
    const Tile tile = multiply_panels(matrix, x, rows.count, &range, 1, thread);
    element_ops().add(tile.all(0, 1), 0, panel.num_columns, to, matrix.num_columns);
  }

  // Panels of gate and up alternate: a pair gives 32 columns.
  void gated_unit(const OpSpec& op, const Operand& x, Rows rows, int index, int thread) {
    const PanelRange range{2 * index, 2};
    Activations& target = program_.buffers[op.target];
    const size_t row_bytes = gated_bytes(target.width, op.matrix->is_exact), written = op.matrix->is_exact ? kPanelColumns * 4 : sizeof(ActivationGroup);
    uint8_t* out = target.memory.data() + rows.first * row_bytes;
    fetch_targets(out + index * written, row_bytes, written, rows.count);
    const Tile tile = multiply_panels(*op.matrix, x, rows.count, &range, 1, thread);
    if (op.matrix->is_exact) {
      element_ops().gate(tile.all(0, 2), reinterpret_cast<float*>(out) + index * kPanelColumns, row_bytes / 4);
    } else {
      element_ops().gate_quantize(tile.all(0, 2), reinterpret_cast<ActivationGroup*>(out) + index, int(row_bytes / sizeof(ActivationGroup)));
    }
  }

  void logits_unit(const OpSpec& op, const Operand& x, Rows rows, int index, int thread) {
    const Matrix& matrix = *op.matrix;
    const int last = std::min((index + 1) * kLogitPanels, matrix.num_panels);
    for (int p = index * kLogitPanels; p < last; ++p) {
      const Panel& panel = matrix.panels[p];
      float* to = step_.logits + size_t(rows.first) * matrix.num_columns + panel.first_column;
      fetch_targets(to, size_t(matrix.num_columns) * 4, size_t(panel.num_columns) * 4, rows.count);
      const PanelRange range{p, 1};
      const Tile tile = multiply_panels(matrix, x, rows.count, &range, 1, thread);
      for (int r = 0; r < rows.count; ++r) {
        std::memcpy(to + size_t(r) * matrix.num_columns, tile.sums + size_t(r) * kPanelColumns, size_t(panel.num_columns) * 4);
      }
    }
  }

  struct alignas(128) Spent {
    uint64_t ns[kNumOpKinds] = {};
  };

  Program& program_;
  const StepArgs& step_;
  ThreadPool& pool_;
  int num_tokens_;
  bool rows_are_logits_ = false;
  size_t widest_ = 0;  // bytes of the longest row that any operation prepares, as f32 or quantized
  std::vector<Spent> spent_ = std::vector<Spent>(pool_.num_threads());  // by threads, in the segment in hand
  int serial_ = 0;
  std::vector<int> prepared_for_ = std::vector<int>(pool_.num_threads(), 0);
};

template <class... Args>
const char* fail(Program& program, const char* format, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, format, args...);
  program.error = text;
  return program.error.c_str();
}

// Null, or what does not fit: checked before anything is written.
const char* check(Program& program, const StepArgs& step) {
  const int num_tokens = step.view.num_tokens;
  for (const OpSpec& op : program.ops) {
    if (op.kind != OpKind::embed) continue;
    for (int t = 0; t < num_tokens; ++t) {
      if (step.token_ids[t] < 0 || step.token_ids[t] >= op.table->num_rows) {
        return fail(program, "token %d has id %d, outside the vocabulary of %d", t, step.token_ids[t], op.table->num_rows);
      }
    }
  }
  for (int t = 0; t < num_tokens; ++t) {
    if (step.positions[t] < 0 || step.positions[t] >= kMaxPositions) {
      return fail(program, "token %d has position %d, outside [0, %d)", t, step.positions[t], kMaxPositions);
    }
  }
  for (int i = 0; i < step.num_logits; ++i) {
    if (step.logit_rows[i] < 0 || step.logit_rows[i] >= num_tokens) {
      return fail(program, "logit_rows[%d] is %d, but the step has %d tokens", i, step.logit_rows[i], num_tokens);
    }
  }
  for (RopeTable* rope : program.ropes) rope->begin_step(step.positions, num_tokens);
  return program.plan.begin(program.kv, step.view);
}

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

Program* anb_program_new(const KVPool* kv) {
  auto* program = new Program;
  program->kv = *kv;
  return program;
}

void anb_program_free(Program* program) { delete program; }

int anb_program_buffer(Program* program, int width, int is_gated) {
  program->buffers.push_back({width, is_gated != 0, {}});
  return int(program->buffers.size()) - 1;
}

void anb_program_add(Program* program, const OpSpec* op) {
  if (op->kind == OpKind::attention) program->last_attention = program->ops.size();
  program->ops.push_back(*op);
  auto& ropes = program->ropes;
  if (op->rope != nullptr && std::find(ropes.begin(), ropes.end(), op->rope) == ropes.end()) ropes.push_back(op->rope);
}

void anb_program_times(const Program* program, uint64_t* spent_ns) { std::copy_n(program->spent_ns, kNumOpKinds, spent_ns); }

const char* anb_program_run(Program* program, const StepArgs* step) {
  try {
    PoolLease pool;
    if (const char* error = check(*program, *step)) return error;
    if (step->view.num_tokens == 0) return nullptr;
    pool->begin_step();
    Run(*program, *step, *pool).run();
    pool->end_step();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return fail(*program, "out of memory for a step of %d tokens", step->view.num_tokens);
  }
}

}  // extern "C"
