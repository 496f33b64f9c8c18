// The parts of the C interface that need no program.
#include "cpu_api.h"

#include <vector>

#include "operand.h"
#include "rope.h"
#include "threads.h"

using namespace anabranch;

extern "C" {

RopeTable* anb_rope_new(const double* inv_freq, int num_pairs, double magnitude) {
  return new RopeTable{std::vector<double>(inv_freq, inv_freq + num_pairs), magnitude, {}, {}};
}

void anb_rope_free(RopeTable* rope) { delete rope; }

void anb_copy_pages(const KVPool* kv, const int32_t* src, const int32_t* dst, int num_pages) {
  PoolLease pool;
  pool->parallel_for(num_pages, [&](int i, int) {
    std::memcpy(kv->data + size_t(dst[i]) * kv->page_bytes, kv->data + size_t(src[i]) * kv->page_bytes, kv->page_bytes);
  });
}

// All bits set is a NaN in every float type, and so are the scales of int8 and int16.
void anb_poison_pages(const KVPool* kv, const int32_t* pages, int num_pages) {
  for (int i = 0; i < num_pages; ++i) std::memset(kv->data + size_t(pages[i]) * kv->page_bytes, 0xff, kv->page_bytes);
}

void anb_matmul(const Matrix* matrix, const float* x, int num_rows, float* out) {
  PoolLease pool;
  const size_t row_bytes = operand_bytes(*matrix);
  std::vector<uint8_t> memory(row_bytes * num_rows + 64);
  auto* rows = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  for (int r = 0; r < num_rows; ++r) prepare_row(*matrix, x + size_t(r) * matrix->k, nullptr, 0.0f, nullptr, rows + r * row_bytes);
  const int block = row_block(num_rows, *matrix), num_blocks = ceil_div(num_rows, block);
  pool->parallel_for(num_blocks * matrix->num_panels, [&](int task, int thread) {
    const Panel& panel = matrix->panels[task % matrix->num_panels];
    const int first_row = task / matrix->num_panels * block, count = std::min(block, num_rows - first_row);
    const Tile tile{static_cast<float*>(pool->scratch(thread, size_t(kRowBlock) * kPanelColumns * 4)), count};
    multiply(*matrix, task % matrix->num_panels, {rows + size_t(first_row) * row_bytes, row_bytes}, tile, 0, panel.data);
    for (int r = 0; r < count; ++r) {
      std::memcpy(out + size_t(first_row + r) * matrix->num_columns + panel.first_column, tile.panel(0) + size_t(r) * kPanelColumns,
                  size_t(panel.num_columns) * 4);
    }
  });
}

void anb_read_rows(const Table* table, const int32_t* ids, int num_ids, float* out) {
  for (int i = 0; i < num_ids; ++i) read_row(*table, ids[i], out + size_t(i) * table->k);
}

}  // extern "C"
