// The inner kernels of attention, once per instruction set.
//
// One (query token, head) is a *query row*. For each block of kBlock slots that it sees anything of, a tile computes its largest score, the
// sum of its weights and its weighted sum of V (attention_float.h, attention_int.h), each in an order that belongs to that row alone, and
// merge() folds the blocks in ascending order. Tiles (which query rows share a load of K or V) only decide what runs side by side in
// registers. So a decode row, a row of a prompt and a row of a shared-prefix group give the same bits.
#pragma once

#include "attention_float.h"
#include "attention_int.h"
#include "attention_write.h"

namespace anabranch {
namespace ANB_ISA {
namespace {

// ---- Finding blocks ----

// A block of one sequence, as far as it has slots.
struct Place {
  const int32_t* pages;
  int kv_head, block, num_slots;
};

ANB_INLINE Place place_of(const Row& row, int kv_head, int block) {
  const int rest = row.kv_len - block * kBlock;
  return {row.pages, kv_head, block, rest < kBlock ? rest : kBlock};
}

template <class S>
ANB_INLINE void locate(const Job& job, const Place& place, Block* found) {
  const KVPool& kv = *job.kv;
  const int chunks_per_page = kv.page_size / kLanes, chunk_bytes = kv.padded_dim * kLanes * S::size;
  int page = place.block * kChunks / chunks_per_page, chunk = place.block * kChunks % chunks_per_page;
  for (int c = 0; c * kLanes < place.num_slots; ++c) {
    const uint8_t* head = job.layer + place.pages[page] * kv.page_bytes + place.kv_head * kv.head_bytes;
    found->k[c] = head + int64_t(chunk) * chunk_bytes;
    found->v[c] = found->k[c] + kv.v_offset;
    if (S::has_scales) {
      found->k_scale[c] = (const float*)(head + kv.scale_offset) + chunk * kLanes;
      found->v_scale[c] = found->k_scale[c] + kv.page_size;
    }
    if (++chunk == chunks_per_page) chunk = 0, ++page;
  }
}

ANB_INLINE void point_at_scratch(const Scratch& s, int chunk_bytes, Block* block) {
  for (int c = 0; c < kChunks; ++c) {
    block->k[c] = (const uint8_t*)s.k + c * chunk_bytes;
    block->v[c] = (const uint8_t*)s.v + c * chunk_bytes;
    block->k_scale[c] = s.k_scale + c * kLanes;
    block->v_scale[c] = s.v_scale + c * kLanes;
  }
}

// A block from pages of any size, into scratch.
template <class S>
void gather(const Job& job, const Place& place, const Scratch& s) {
  const KVPool& kv = *job.kv;
  for (int t = 0; t < place.num_slots; ++t) {
    const int slot = place.block * kBlock + t;
    const uint8_t* head = job.layer + place.pages[slot / kv.page_size] * kv.page_bytes + place.kv_head * kv.head_bytes;
    S::gather_slot(kv, head, slot % kv.page_size, t, s);
  }
}

// ---- Units ----

// Query rows [first, last) of a span: token first_token + i / heads, head kv_head * heads + i % heads.
struct QueryRows {
  const Job& job;
  const Span& span;
  int kv_head;
  int token(int i) const { return span.first_token + i / job.heads_per_kv; }
  int count() const { return (span.last_token - span.first_token) * job.heads_per_kv; }
  int index_of(int token_id) const { return (token_id - span.first_token) * job.heads_per_kv; }
  float* partial(int i, int block) const {
    const int64_t num_blocks = span.last_block - span.first_block;
    const int64_t row = int64_t(kv_head) * count() + i;
    return job.partials + (span.partial_index + row * num_blocks + block - span.first_block) * job.partial_stride;
  }
};

// Steps through query rows without dividing.
struct Walk {
  int token, head, heads;  // head: of the KV head's
  Walk(const QueryRows& rows, int first) : token(rows.token(first)), head(first % rows.job.heads_per_kv), heads(rows.job.heads_per_kv) {}
  bool is_same_token() const { return head > 0; }
  void next() {
    if (++head == heads) head = 0, ++token;
  }
};

constexpr int kFetchRows = 12;  // so many query rows ahead, q and out are fetched

// Query rows [first, last), scaled, tile by tile, so that a tile is read in one line.
template <class S>
void pack_q(const QueryRows& rows, int first, int last, float* packed) {
  const KVPool& kv = *rows.job.kv;
  const auto at = [&](const Walk& w) { return rows.job.q + w.token * rows.job.q_stride + (rows.kv_head * w.heads + w.head) * kv.head_dim; };
  Walk walk(rows, first), ahead(rows, first + kFetchRows);
  for (int i = first, tile; i < last; i += tile, packed += tile * q_words(kv.padded_dim)) {
    tile = tile_size(last - i);
    for (int r = 0; r < tile; ++r, walk.next(), ahead.next()) {
      for (int d = 0; d < kv.head_dim; d += kLanes) prefetch_near(at(ahead) + d);
      S::pack_q(kv, i + r < last ? at(walk) : nullptr, rows.job.scale, r, tile, packed);
    }
  }
}

template <class S>
ANB_INLINE void attend(int tile, bool in_scratch, const Block& block, const Block& ahead, const Seen* seen, const float* q, int dim,
                       const Scratch& s, float* row_max, float* row_sum) {
  switch (tile) {
#define ANB_CASE(R) \
  case R: S::template attend<R>(in_scratch, block, ahead, seen, q, dim, s, row_max, row_sum); break;
    ANB_CASE(1) ANB_CASE(2)
#if defined(__AVX2__)
    ANB_CASE(3) ANB_CASE(4) ANB_CASE(6)
#endif
#if defined(__AVX512F__)
    ANB_CASE(8) ANB_CASE(12)
#endif
#undef ANB_CASE
  }
}

ANB_INLINE void store_partial(float* partial, const float* out, int dim, float row_max, float row_sum) {
  partial[dim] = row_max;
  partial[dim + 1] = row_sum;
  if (row_sum == -1.0f) return;
  for (int d = 0; d < dim; d += kLanes) store(partial + d, load(out + d));
}

// Query rows [first, last), whose pages are the same there, against one block; results into the state or the partials. `ahead` is the block
// that comes next (num_slots 0: none).
template <class S>
void attend_block(const QueryRows& rows, int first, int last, const int32_t* pages, int block, const Place& ahead, bool to_partials, const Scratch& s) {
  const Job& job = rows.job;
  const KVPool& kv = *job.kv;
  const int dim = kv.padded_dim, start = block * kBlock;
  int num_slots = 0;
  for (int token = rows.token(first); token <= rows.token(last - 1); ++token) {
    const int end = clamp_to_block(job.visible[token].hi - start);
    if (job.visible[token].lo - start < kBlock && end > num_slots) num_slots = end;
  }
  Block found, next;
  const Place place{pages, rows.kv_head, block, num_slots};
  const bool has_chunks = kv.chunk == kLanes, in_scratch = !has_chunks || last - first >= S::widen_rows;
  if (has_chunks) locate<S>(job, place, &found);
  if (in_scratch) {
    if (has_chunks) S::widen_block(found, num_slots, dim, s);
    else gather<S>(job, place, s);
    point_at_scratch(s, dim * kLanes * S::scratch_size, &found);
  }
  next = found;
  if (!in_scratch && ahead.num_slots > 0) locate<S>(job, ahead, &next);

  const float* q = s.q;
  Walk walk(rows, first);
  for (int i = first, tile; i < last; i += tile, q += tile * q_words(dim)) {
    tile = tile_size(last - i);
    Seen seen[kMaxTile];
    float row_max[kLanes] = {}, row_sum[kLanes] = {};
    for (int r = 0; r < tile; ++r) {
      seen[r] = r > 0 && (walk.is_same_token() || i + r >= last) ? seen[r - 1] : seen_in_block(job.visible[walk.token], block);
      if (i + r < last) walk.next();
    }
    attend<S>(tile, in_scratch, found, next, seen, q, dim, s, row_max, row_sum);
    const int n = last - i < tile ? last - i : tile;
    if (to_partials) {
      for (int r = 0; r < n; ++r) store_partial(rows.partial(i + r, block), s.tile_out + r * dim, dim, row_max[r], row_sum[r]);
    } else {
      const float* out[kLanes];
      for (int r = 0; r < n; ++r) out[r] = s.tile_out + r * dim;
      merge(s, dim, i, n, out, row_max, row_sum);
    }
  }
}

void clear_states(const Scratch& s, int num_rows) {
  for (int i = 0; i < num_rows; i += kLanes) store(s.sum + i, set1(-1.0f)), store(s.max + i, zero());
}

void finish_rows(const QueryRows& rows, const Scratch& s) {
  const KVPool& kv = *rows.job.kv;
  const auto at = [&](const Walk& w) { return rows.job.out + w.token * rows.job.out_stride + (rows.kv_head * w.heads + w.head) * kv.head_dim; };
  Walk walk(rows, 0), ahead(rows, kFetchRows);
  for (int i = 0; i < rows.count(); ++i, walk.next(), ahead.next()) {
    for (int d = 0; d < kv.head_dim; d += kLanes) prefetch_to_write(at(ahead) + d);
    finish(s.state + int64_t(i) * kv.padded_dim, s.sum[i], kv.head_dim, at(walk));
  }
}

// The part of `row` that lies in the span.
ANB_INLINE int first_of(const QueryRows& rows, const Row& row) {
  return rows.index_of(row.first_token > rows.span.first_token ? row.first_token : rows.span.first_token);
}
ANB_INLINE int last_of(const QueryRows& rows, const Row& row) {
  return rows.index_of(row.last_token < rows.span.last_token ? row.last_token : rows.span.last_token);
}

ANB_INLINE int first_own_block(const Span& span, const Row& row) {
  return row.first_block > span.shared_blocks ? row.first_block : span.shared_blocks;
}

// The first block of a unit's work.
ANB_INLINE Place start_of(const Job& job, const Unit& unit) {
  const Span& span = job.spans[unit.span];
  const Row& row = job.rows[unit.kind == UnitKind::own ? unit.row : span.first_row];
  if (unit.kind != UnitKind::whole) return place_of(row, unit.kv_head, unit.first_block);
  return place_of(row, unit.kv_head, span.first_block < span.shared_blocks ? span.first_block : first_own_block(span, row));
}

template <class S>
void run_shared(const QueryRows& rows, int first_block, int last_block, const Place& after, bool to_partials, const Scratch& s) {
  if (first_block >= last_block) return;
  const Row& row = rows.job.rows[rows.span.first_row];
  pack_q<S>(rows, 0, rows.count(), s.q);
  for (int b = first_block; b < last_block; ++b)
    attend_block<S>(rows, 0, rows.count(), row.pages, b, b + 1 < last_block ? place_of(row, rows.kv_head, b + 1) : after, to_partials, s);
}

template <class S>
void run_own(const QueryRows& rows, int row_id, int first_block, int last_block, const Place& after, bool to_partials, const Scratch& s) {
  const Row& row = rows.job.rows[row_id];
  const int first = first_of(rows, row), last = last_of(rows, row);
  if (first >= last || first_block >= last_block) return;
  pack_q<S>(rows, first, last, s.q);
  for (int b = first_block; b < last_block; ++b)
    attend_block<S>(rows, first, last, row.pages, b, b + 1 < last_block ? place_of(row, rows.kv_head, b + 1) : after, to_partials, s);
}

template <class S>
void run_whole(const QueryRows& rows, const Place& after, const Scratch& s) {
  const Span& span = rows.span;
  const Row* all = rows.job.rows;
  const auto start_of_row = [&](int r) { return r < span.last_row ? place_of(all[r], rows.kv_head, first_own_block(span, all[r])) : after; };
  clear_states(s, rows.count());
  run_shared<S>(rows, span.first_block, span.shared_blocks, start_of_row(span.first_row), false, s);
  for (int r = span.first_row; r < span.last_row; ++r)
    run_own<S>(rows, r, first_own_block(span, all[r]), all[r].last_block, start_of_row(r + 1), false, s);
}

void merge_partials(const QueryRows& rows, const Scratch& s) {
  const int dim = rows.job.kv->padded_dim;
  clear_states(s, rows.count());
  for (int r = rows.span.first_row; r < rows.span.last_row; ++r) {
    const Row& row = rows.job.rows[r];
    for (int i = first_of(rows, row), n; i < last_of(rows, row); i += n) {
      n = last_of(rows, row) - i < kLanes ? last_of(rows, row) - i : kLanes;
      const auto fold = [&](int block) {
        const float* out[kLanes];
        float row_max[kLanes] = {}, row_sum[kLanes] = {};
        for (int j = 0; j < n; ++j) {
          out[j] = rows.partial(i + j, block);
          row_max[j] = out[j][dim];
          row_sum[j] = out[j][dim + 1];
        }
        merge(s, dim, i, n, out, row_max, row_sum);
      };
      for (int b = rows.span.first_block; b < rows.span.shared_blocks; ++b) fold(b);
      for (int b = first_own_block(rows.span, row); b < row.last_block; ++b) fold(b);
    }
  }
}

template <class S>
void run_unit_of(const Job& job, const Unit& unit, const Unit* next, void* memory) {
  const Span& span = job.spans[unit.span];
  const QueryRows rows{job, span, unit.kv_head};
  const Scratch s = lay_out(memory, job.kv->padded_dim, rows.count());
  const Place after = next ? start_of(job, *next) : Place{};
  switch (unit.kind) {
    case UnitKind::whole: run_whole<S>(rows, after, s); return finish_rows(rows, s);
    case UnitKind::shared: run_shared<S>(rows, unit.first_block, unit.last_block, after, true, s); break;
    case UnitKind::own: run_own<S>(rows, unit.row, unit.first_block, unit.last_block, after, true, s); break;
  }
  std::atomic<int32_t>& remaining = job.remaining[int64_t(unit.span) * job.kv->num_kv_heads + unit.kv_head];
  if (remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  remaining.store(job.num_units[unit.span], std::memory_order_relaxed);  // for the next layer
  merge_partials(rows, s);
  finish_rows(rows, s);
}

void run_unit(const Job& job, const Unit& unit, const Unit* next, void* scratch) {
  switch (KVType(job.kv->type)) {
    case KVType::f32: return run_unit_of<FloatScheme<F32>>(job, unit, next, scratch);
    case KVType::f16: return run_unit_of<FloatScheme<F16>>(job, unit, next, scratch);
    case KVType::bf16: return run_unit_of<FloatScheme<BF16>>(job, unit, next, scratch);
    case KVType::i8: return run_unit_of<IntScheme<I8>>(job, unit, next, scratch);
    case KVType::i16: return run_unit_of<IntScheme<I16>>(job, unit, next, scratch);
  }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {scratch_bytes, run_unit, write_kv};

}  // namespace ANB_ISA
}  // namespace anabranch
