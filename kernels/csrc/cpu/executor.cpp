// Replays a recorded forward for one step: each operation is one or two parallel loops over (block of rows, panels of columns).
//
// Few rows: every thread norms and quantizes all of them for itself, which is cheaper than a barrier. Many rows: a loop of its own
// does it once. Either way a row's arithmetic is the same, and only which thread did it differs.
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
constexpr int kRedundantRows = 2;     // up to so many, each thread prepares all rows for itself
constexpr int kMaxPositions = 1 << 26;
constexpr int kLogitPanels = 8;       // panels per task of the output projection

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
    uint64_t before = monotonic_ns();
    for (size_t i = 0; i < program_.ops.size(); ++i) {
      const OpSpec& op = program_.ops[i];
      if (i == program_.last_attention && step_.num_logits == 0) return;  // the KV is written, and that was all
      switch (op.kind) {
        case OpKind::embed: embed(op); break;
        case OpKind::attention_input: attention_input(op); break;
        case OpKind::attention: attend(op); break;
        case OpKind::linear_add: linear_add(op); break;
        case OpKind::gated_mlp_input: gated_mlp_input(op); break;
        case OpKind::logits: logits(op); break;
      }
      if (i == program_.last_attention) keep_logit_rows(i);
      const uint64_t now = monotonic_ns();
      program_.spent_ns[int(op.kind)] += now - before;
      before = now;
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

  void embed(const OpSpec& op) {
    const Table& table = *op.table;
    float* out = floats(op.target);
    const int chunk = num_tokens_ < 16 ? num_tokens_ : 8;
    pool_.parallel_for(ceil_div(num_tokens_, chunk), [&](int task, int) {
      for (int t = task * chunk; t < std::min(num_tokens_, (task + 1) * chunk); ++t) read_row(table, step_.token_ids[t], out + size_t(t) * table.k);
    });
  }

  // Rows `row_at(0..num_rows)` normed and quantized for `matrix`, then `body(task, thread, operand)` for each task.
  template <class RowAt, class Body>
  void with_rows(const Matrix& matrix, int num_rows, const float* norm, float eps, RowAt row_at, int num_tasks, Body body) {
    const size_t row_bytes = operand_bytes(matrix);
    if (num_rows <= kRedundantRows) {
      const int serial = ++serial_;
      pool_.parallel_for(num_tasks, [&](int task, int thread) {
        const ThreadMemory own = memory(thread);
        if (prepared_for_[thread] != serial) {
          for (int r = 0; r < num_rows; ++r) prepare_row(matrix, row_at(r), norm, eps, own.normed, own.prepared + r * row_bytes);
          prepared_for_[thread] = serial;
        }
        body(task, thread, Operand{own.prepared, row_bytes});
      });
      return;
    }
    uint8_t* rows = program_.prepared.resize(row_bytes * num_rows);
    const int chunk = std::max(1, std::min(16, num_rows / (2 * pool_.num_threads())));
    pool_.parallel_for(ceil_div(num_rows, chunk), [&](int task, int thread) {
      float* normed = memory(thread).normed;
      for (int r = task * chunk; r < std::min(num_rows, (task + 1) * chunk); ++r) {
        prepare_row(matrix, row_at(r), norm, eps, normed, rows + r * row_bytes);
      }
    });
    pool_.parallel_for(num_tasks, [&](int task, int thread) { body(task, thread, Operand{rows, row_bytes}); });
  }

  // What a thread has to itself, in one piece of scratch: it never moves while an operation runs.
  struct ThreadMemory {
    float* sums;       // a Tile
    float* heads;      // K and V of a task, unpanelled
    float* normed;     // one row
    uint8_t* prepared; // kRedundantRows operand rows
  };

  ThreadMemory memory(int thread) {
    constexpr size_t sums = size_t(kMaxPanels) * kRowBlock * kPanelColumns * 4;
    auto* p = static_cast<uint8_t*>(pool_.scratch(thread, 2 * sums + widest_ * (kRedundantRows + 1)));
    uint8_t* after = p + 2 * sums;
    return {reinterpret_cast<float*>(p), reinterpret_cast<float*>(p + sums), reinterpret_cast<float*>(after), after + widest_};
  }

  // The sums of a task's panels, bias included.
  Tile multiply_panels(const Matrix& matrix, const Operand& x, int first_row, int num_rows, const PanelRange* ranges, int num_ranges, int thread) {
    const ThreadMemory own = memory(thread);
    const Tile tile{own.sums, first_row, num_rows};
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

  // A head unit is the fewest panels that hold whole heads.
  struct HeadUnits {
    int panels, heads;  // of one unit
    explicit HeadUnits(int head_dim) {
      heads = 1;
      while (heads * head_dim % kPanelColumns != 0) ++heads;
      panels = heads * head_dim / kPanelColumns;
    }
  };

  void attention_input(const OpSpec& op) {
    const Matrix& matrix = *op.matrix;
    const HeadUnits unit(op.head_dim);
    const int q_panels = ceil_div(op.num_q_heads * op.head_dim, kPanelColumns), kv_panels = ceil_div(op.num_kv_heads * op.head_dim, kPanelColumns);
    const int q_units = ceil_div(q_panels, unit.panels), kv_units = ceil_div(kv_panels, unit.panels), num_units = q_units + kv_units;
    const int block = row_block(num_tokens_, matrix), num_blocks = ceil_div(num_tokens_, block);
    const float* h = floats(op.source);
    const auto row_at = [&](int r) { return h + size_t(r) * matrix.k; };
    with_rows(matrix, num_tokens_, op.norm, op.eps, row_at, num_blocks * num_units, [&](int task, int thread, const Operand& x) {
      const int first_row = task / num_units * block, num_rows = std::min(block, num_tokens_ - first_row), u = task % num_units;
      // KV units are twice as long: they are spread among the others, first ones first.
      const int kv_before = int(int64_t(u) * kv_units / num_units), kv_after = int(int64_t(u + 1) * kv_units / num_units);
      if (kv_after > kv_before) {
        key_value_unit(op, x, first_row, num_rows, kv_before, unit, q_panels, kv_panels, thread);
      } else {
        query_unit(op, x, first_row, num_rows, u - kv_before, unit, q_panels, thread);
      }
    });
  }

  const float* const* angles(const OpSpec& op, int first_row) const { return op.rope->rows.data() + first_row; }

  void query_unit(const OpSpec& op, const Operand& x, int first_row, int num_rows, int index, const HeadUnits& unit, int q_panels, int thread) {
    const PanelRange range{index * unit.panels, std::min(unit.panels, q_panels - index * unit.panels)};
    const Tile tile = multiply_panels(*op.matrix, x, first_row, num_rows, &range, 1, thread);
    const int width = op.num_q_heads * op.head_dim, first_head = index * unit.heads, num_heads = std::min(unit.heads, op.num_q_heads - first_head);
    float* q = floats(op.target) + size_t(first_row) * width + size_t(first_head) * op.head_dim;
    element_ops().finish_heads({tile.all(0, range.count), num_heads, op.head_dim, op.q_norm, op.eps, angles(op, first_row),
                                op.rope->num_pairs(), q, size_t(width)});
  }

  // K and V of the same heads, so that they are written together.
  void key_value_unit(const OpSpec& op, const Operand& x, int first_row, int num_rows, int index, const HeadUnits& unit, int q_panels, int kv_panels,
                      int thread) {
    const int count = std::min(unit.panels, kv_panels - index * unit.panels), first = q_panels + index * unit.panels;
    const PanelRange ranges[2] = {{first, count}, {first + kv_panels, count}};
    const Tile tile = multiply_panels(*op.matrix, x, first_row, num_rows, ranges, 2, thread);
    const int first_head = index * unit.heads, num_heads = std::min(unit.heads, op.num_kv_heads - first_head), width = num_heads * op.head_dim;
    float* k = memory(thread).heads;
    float* v = k + size_t(num_rows) * width;
    element_ops().finish_heads({tile.all(0, count), num_heads, op.head_dim, op.k_norm, op.eps, angles(op, first_row), op.rope->num_pairs(), k,
                                size_t(width)});
    element_ops().finish_heads({tile.all(count, count), num_heads, op.head_dim, nullptr, op.eps, nullptr, 0, v, size_t(width)});
    const KVSlot* slots = program_.plan.slots() + first_row;
    for (int i = 0; i < num_heads; ++i) {
      write_kv(program_.kv, op.layer, first_head + i, slots, num_rows, k + i * op.head_dim, width, v + i * op.head_dim, width);
    }
  }

  void attend(const OpSpec& op) {
    const int64_t width = int64_t(op.num_q_heads) * op.head_dim;
    attention(program_.plan, pool_, {op.layer, op.num_q_heads, op.scale, op.window, floats(op.source), width, floats(op.target), width});
  }

  // --- projections -----------------------------------------------------------------------------------------------------------

  void linear_add(const OpSpec& op) {
    const Matrix& matrix = *op.matrix;
    const Activations& source = program_.buffers[op.source];
    const int block = row_block(num_tokens_, matrix), num_blocks = ceil_div(num_tokens_, block), num_tasks = num_blocks * matrix.num_panels;
    float* h = floats(op.target);
    const auto body = [&](int task, int thread, const Operand& x) {
      const int first_row = task / matrix.num_panels * block, num_rows = std::min(block, num_tokens_ - first_row);
      const PanelRange range{task % matrix.num_panels, 1};
      const Tile tile = multiply_panels(matrix, x, first_row, num_rows, &range, 1, thread);
      const Panel& panel = matrix.panels[range.first];
      float* to = h + size_t(first_row) * matrix.num_columns + panel.first_column;
      element_ops().add(tile.all(0, 1), 0, panel.num_columns, to, matrix.num_columns);
    };
    if (source.is_gated) {
      const Operand x{source.memory.data(), gated_bytes(source.width, matrix.is_exact)};
      pool_.parallel_for(num_tasks, [&](int task, int thread) { body(task, thread, x); });
      return;
    }
    const float* from = source.memory.floats();
    with_rows(matrix, num_tokens_, nullptr, 0.0f, [&](int r) { return from + size_t(r) * matrix.k; }, num_tasks, body);
  }

  void gated_mlp_input(const OpSpec& op) {
    const Matrix& matrix = *op.matrix;
    Activations& target = program_.buffers[op.target];
    const int num_pairs = matrix.num_panels / 2, block = row_block(num_tokens_, matrix), num_blocks = ceil_div(num_tokens_, block);
    const float* h = floats(op.source);
    const size_t row_bytes = gated_bytes(target.width, matrix.is_exact);
    uint8_t* out = target.memory.data();
    const auto row_at = [&](int r) { return h + size_t(r) * matrix.k; };
    with_rows(matrix, num_tokens_, op.norm, op.eps, row_at, num_blocks * num_pairs, [&](int task, int thread, const Operand& x) {
      const int first_row = task / num_pairs * block, num_rows = std::min(block, num_tokens_ - first_row), pair = task % num_pairs;
      const PanelRange range{2 * pair, 2};
      const Tile tile = multiply_panels(matrix, x, first_row, num_rows, &range, 1, thread);
      uint8_t* rows = out + size_t(first_row) * row_bytes;
      if (matrix.is_exact) {
        element_ops().gate(tile.all(0, 2), reinterpret_cast<float*>(rows) + pair * kPanelColumns, row_bytes / 4);
      } else {
        element_ops().gate_quantize(tile.all(0, 2), reinterpret_cast<ActivationGroup*>(rows) + pair, int(row_bytes / sizeof(ActivationGroup)));
      }
    });
  }

  void logits(const OpSpec& op) {
    if (step_.num_logits == 0) return;
    const Matrix& matrix = *op.matrix;
    const int num_rows = step_.num_logits, block = row_block(num_rows, matrix), num_blocks = ceil_div(num_rows, block);
    const int num_groups = ceil_div(matrix.num_panels, kLogitPanels);
    const float* h = floats(op.source);
    const auto row_at = [&](int r) { return h + size_t(rows_are_logits_ ? r : step_.logit_rows[r]) * matrix.k; };
    with_rows(matrix, num_rows, op.norm, op.eps, row_at, num_blocks * num_groups, [&](int task, int thread, const Operand& x) {
      const int first_row = task / num_groups * block, rows = std::min(block, num_rows - first_row), first = task % num_groups * kLogitPanels;
      const PanelRange range{first, std::min(kLogitPanels, matrix.num_panels - first)};
      const Tile tile = multiply_panels(matrix, x, first_row, rows, &range, 1, thread);
      for (int r = 0; r < rows; ++r) {
        float* to = step_.logits + size_t(first_row + r) * matrix.num_columns;
        for (int p = 0; p < range.count; ++p) {
          const Panel& panel = matrix.panels[first + p];
          std::memcpy(to + panel.first_column, tile.panel(p) + size_t(r) * kPanelColumns, size_t(panel.num_columns) * 4);
        }
      }
    });
  }

  Program& program_;
  const StepArgs& step_;
  ThreadPool& pool_;
  int num_tokens_;
  bool rows_are_logits_ = false;
  size_t widest_ = 0;  // bytes of the longest row that any operation prepares, as f32 or quantized
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
