// How the bits stay the same whatever the step looks like: the arithmetic of one query row is fixed by
// its own position. Its keys form segments of kSegmentKeys by absolute position, each with a softmax of
// its own; a score adds up over d in sequence (vector lanes are keys), an output over keys in sequence
// (lanes are d), and a row's segments are merged in order. How rows are tiled, which thread runs what,
// how keys are spread over pages, and whether a page is read in place or through scratch (widening to
// f32 is exact) decides only speed.
//
// Keys after a row's position are never multiplied with, so garbage in unused slots cannot reach it.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "attention_int8.h"
#include "multiply.h"
#include "parallel.h"
#include "simd.h"
#include "softmax.h"

namespace trnc {
namespace {

constexpr int64_t kTileRows = 96;  // (query, head) rows that share a widened block

// What a thread needs to run one tile. The softmax of row i over some keys is `top[i]`, their largest
// score, and `result[i]`: the sums of weight * value and of weight, where a weight is exp(score - top).
struct Scratch {
  Int8Scratch int8;
  Buffer<float> q, block, row, scores, top, result, merged_top, merged;

  void fit(const Problem& p, int64_t rows) {
    grow(q, rows * p.keys.head_dim);
    grow(block, p.width * p.keys.page_size);
    grow(row, p.width);
    grow(scores, rows * kScoreStride);
    grow(top, rows);
    grow(result, rows * p.stride);
    grow(merged_top, rows);
    grow(merged, rows * p.stride);
  }
};

void load_queries(const Problem& p, const Tile& tile, float* q) {
  const int64_t d = p.keys.head_dim;
  for (int64_t row = 0; row < p.rows(tile); ++row) {
    const float* from = p.q + p.offset(tile, row);
    for (int64_t i = 0; i < d; ++i) q[row * d + i] = from[i] * p.scale;
  }
}

template <class T>
void widen_row(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, widen(from + i));
  if (i < n) store(to + i, widen_n(from + i, static_cast<int>(n - i)));
}

// Keys or values of one block: rows `data + i * stride`.
template <class T>
struct Block {
  const T* data;
  int64_t stride;
};

// Widens the first `end` keys of a block into scratch, [head_dim, page_size]: those before the
// sequence's start from its page, the others from the step's rows. Later lanes keep what they held.
template <class T>
Block<float> gather_keys(const Problem& p, const Tile& tile, int64_t block, int64_t end, Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size;
  const int64_t own = first_own_key(p, tile, block, end);
  if (own > 0) {
    const T* page = static_cast<const T*>(p.keys.k_pages) + p.page_offset(tile, block);
    for (int64_t i = 0; i < d * size; i += kLanes) store(s.block.data() + i, widen(page + i));
  }
  for (int64_t key = own; key < end; ++key) {
    const T* row = static_cast<const T*>(p.keys.k_new) + own_row(p, tile, block, key);
    widen_row(row, s.row.data(), d);
    for (int64_t i = 0; i < d; ++i) s.block[i * size + key] = s.row[i];
  }
  return {s.block.data(), size};
}

// The same for values, [page_size, width].
template <class T>
Block<float> gather_values(const Problem& p, const Tile& tile, int64_t block, int64_t end, Scratch& s) {
  const int64_t d = p.keys.head_dim;
  const int64_t own = first_own_key(p, tile, block, end);
  const T* page = static_cast<const T*>(p.keys.v_pages);
  if (own > 0) page += p.page_offset(tile, block);
  for (int64_t key = 0; key < end; ++key) {
    const T* row = key < own ? page + key * p.keys.row_size
                             : static_cast<const T*>(p.keys.v_new) + own_row(p, tile, block, key);
    widen_row(row, s.block.data() + key * p.width, d);
  }
  return {s.block.data(), p.width};
}

// A block of keys, or of values, as its page holds them.
template <class T>
Block<T> in_page(const Problem& p, const Tile& tile, const void* pages, int64_t block, int64_t stride) {
  return {static_cast<const T*>(pages) + p.page_offset(tile, block), stride};
}

// Scores a block of keys for the rows begin.. that have reached it.
template <class T>
void score_block(const Problem& p, const Tile& tile, int64_t begin, Block<T> keys, float* scores, Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size, rows = p.rows(tile);
  for (int64_t row = begin; row < rows; ++row) std::fill_n(scores + row * kScoreStride, size, 0.0f);
  multiply(rows - begin, size, s.q.data() + begin * d, d, keys.data, keys.stride, d,
           scores + begin * kScoreStride, kScoreStride);
}

// Adds a block of values, weighted, to the results of the rows begin.. that have reached it.
template <class T>
void weigh_block(const Problem& p, const Tile& tile, int64_t block, int64_t begin, Block<T> values,
                 float* weights, Scratch& s) {
  const int64_t size = p.keys.page_size, rows = p.rows(tile);
  for (int64_t row = begin, end; row < rows; row = end) {
    const int64_t valid = std::min(size, p.position(tile, row) + 1 - block * size);
    end = valid == size ? rows : row + p.group;  // rows that have passed the block go together
    multiply(end - row, p.width, weights + row * kScoreStride, kScoreStride, values.data, values.stride, valid,
             s.result.data() + row * p.stride, p.stride);
  }
}

// Leaves in scratch the softmax of each row over its keys in one segment. Values are asked for while keys are multiplied,
// and the keys of what comes next while values are.
template <class T>
void attend_segment(const Problem& p, const Tile& tile, int64_t segment, Ahead ahead, Scratch& s) {
  const int64_t rows = p.rows(tile), size = p.keys.page_size, from = segment * kSegmentKeys;
  const int64_t first = from / size;
  const int64_t last = std::min(first + kSegmentKeys / size - 1, p.last_position(tile) / size);
  const auto in_place = [&](int64_t block) {
    const bool cached = (block + 1) * size <= p.sequence(tile).start;
    return cached && rows <= kRows && p.width == p.keys.head_dim;
  };
  for (int64_t block = first; block <= last; ++block) {
    const auto [begin, end] = reach(p, tile, block);
    float* scores = s.scores.data() + block * size - from;
    prefetch_block<T>(p, {&tile, segment}, p.keys.v_pages, block - first);
    if (in_place(block)) {
      score_block(p, tile, begin, in_page<T>(p, tile, p.keys.k_pages, block, size), scores, s);
    } else {
      score_block(p, tile, begin, gather_keys<T>(p, tile, block, end, s), scores, s);
    }
  }
  std::fill_n(s.result.begin(), rows * p.stride, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t valid = std::min(kSegmentKeys, p.position(tile, row) + 1 - from);
    s.top[row] = softmax(s.scores.data() + row * kScoreStride, valid, s.result.data() + row * p.stride + p.width);
  }
  for (int64_t block = first; block <= last; ++block) {
    const auto [begin, end] = reach(p, tile, block);
    float* weights = s.scores.data() + block * size - from;
    prefetch_block<T>(p, ahead, p.keys.k_pages, block - first);
    if (in_place(block)) {
      weigh_block(p, tile, block, begin, in_page<T>(p, tile, p.keys.v_pages, block, p.keys.row_size), weights, s);
    } else {
      weigh_block(p, tile, block, begin, gather_values<T>(p, tile, block, end, s), weights, s);
    }
  }
}

template <>
void attend_segment<I8>(const Problem& p, const Tile& tile, int64_t segment, Ahead ahead, Scratch& s) {
  attend_segment_int8(p, tile, segment, ahead, s.scores.data(), s.top.data(), s.result.data(), s.int8);
}

// Folds the next segment of each row into those before it.
void merge_segment(const Problem& p, const Tile& tile, int64_t segment, const float* top, const float* result,
                   Scratch& s) {
  for (int64_t row = 0; row < p.rows(tile); ++row) {
    if (p.position(tile, row) < segment * kSegmentKeys) continue;
    const float largest = std::max(s.merged_top[row], top[row]);
    const F32x16 before = exp(broadcast(s.merged_top[row] - largest));
    const F32x16 here = exp(broadcast(top[row] - largest));
    float* merged = s.merged.data() + row * p.stride;
    for (int64_t i = 0; i < p.stride; i += kLanes)
      store(merged + i, fma(load(result + row * p.stride + i), here, load(merged + i) * before));
    s.merged_top[row] = largest;
  }
}

void begin_merge(const Problem& p, int64_t rows, Scratch& s) {
  std::fill_n(s.merged_top.begin(), rows, -kInfinity);
  std::fill_n(s.merged.begin(), rows * p.stride, 0.0f);
}

void write_rows(const Problem& p, const Tile& tile, const Scratch& s) {
  const int64_t d = p.keys.head_dim;
  for (int64_t row = 0; row < p.rows(tile); ++row) {
    const float* merged = s.merged.data() + row * p.stride;
    const F32x16 weights = broadcast(reduce_add(load(merged + p.width)));
    float* out = p.out + p.offset(tile, row);
    for (int64_t i = 0; i < d; i += kLanes)
      store_n(out + i, load(merged + i) / weights, static_cast<int>(d - i));
  }
}

// A tile over all its keys or, where one tile is a large share of the step, over one segment of them.
struct Item {
  Tile tile;
  int64_t segment;  // -1 for all
  int64_t cost;
  int64_t parked;  // where the results of a segment wait to be merged
};

struct Plan {
  std::vector<Tile> tiles, cut;
  std::vector<Item> items;
  Buffer<float> parked;  // for each segment of a cut tile: its rows' results, then their tops
};

void make_tiles(const Problem& p, std::vector<Tile>& tiles) {
  const int32_t queries = static_cast<int32_t>(std::max<int64_t>(1, kTileRows / p.group));
  tiles.clear();
  for (int32_t i = 0; i < p.keys.num_sequences; ++i) {
    const int32_t count = p.keys.sequences[i].count;
    for (int32_t query = 0; query < count; query += queries) {
      for (int32_t head = 0; head < p.keys.kv_heads; ++head)
        tiles.push_back({i, head, query, std::min(queries, count - query)});
    }
  }
}

int64_t cost(const Problem& p, const Tile& tile) { return p.rows(tile) * (p.last_position(tile) + 1); }

void make_plan(const Problem& p, Plan& plan) {
  make_tiles(p, plan.tiles);
  int64_t total = 0, parked = 0;
  for (const Tile& tile : plan.tiles) total += cost(p, tile);
  plan.items.clear();
  plan.cut.clear();
  for (const Tile& tile : plan.tiles) {
    const int64_t segments = p.segments(tile);
    if (segments == 1 || num_threads() == 1 || cost(p, tile) * num_threads() * 4 < total) {
      plan.items.push_back({tile, -1, cost(p, tile), 0});
      continue;
    }
    plan.cut.push_back(tile);
    for (int64_t segment = 0; segment < segments; ++segment) {
      plan.items.push_back({tile, segment, cost(p, tile) / segments, parked});
      parked += p.rows(tile) * (p.stride + 1);
    }
  }
  grow(plan.parked, parked);
  std::sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

template <class T>
void run_item(const Problem& p, const Item& item, const Item* next, float* parked, Scratch& s) {
  const int64_t rows = p.rows(item.tile);
  s.fit(p, rows);
  load_queries(p, item.tile, s.q.data());
  if constexpr (std::is_same_v<T, I8>) {
    s.int8.fit(p, rows);
    round_queries(p, item.tile, s.q.data(), s.int8);
  }
  const Ahead after = next ? Ahead{&next->tile, std::max<int64_t>(0, next->segment)} : Ahead{nullptr, 0};
  if (item.segment >= 0) {
    attend_segment<T>(p, item.tile, item.segment, after, s);
    std::copy_n(s.result.data(), rows * p.stride, parked + item.parked);
    std::copy_n(s.top.data(), rows, parked + item.parked + rows * p.stride);
    return;
  }
  begin_merge(p, rows, s);
  const int64_t segments = p.segments(item.tile);
  for (int64_t segment = 0; segment < segments; ++segment) {
    attend_segment<T>(p, item.tile, segment, segment + 1 < segments ? Ahead{&item.tile, segment + 1} : after, s);
    merge_segment(p, item.tile, segment, s.top.data(), s.result.data(), s);
  }
  write_rows(p, item.tile, s);
}

void merge_parked(const Problem& p, const Plan& plan, Scratch& s) {
  const float* parked = plan.parked.data();
  for (const Tile& tile : plan.cut) {
    const int64_t rows = p.rows(tile);
    s.fit(p, rows);
    begin_merge(p, rows, s);
    for (int64_t segment = 0; segment < p.segments(tile); ++segment) {
      merge_segment(p, tile, segment, parked + rows * p.stride, parked, s);
      parked += rows * (p.stride + 1);
    }
    write_rows(p, tile, s);
  }
}

Scratch& scratch() {
  thread_local const auto scratch = std::make_unique<Scratch>();  // its address is looked up once a call
  return *scratch;
}

template <class T>
void attend(const Problem& p) {
  thread_local const auto own_plan = std::make_unique<Plan>();
  Plan& plan = *own_plan;
  make_plan(p, plan);
  parallel_for(static_cast<int64_t>(plan.items.size()), 1, [&p, &plan](int64_t begin, int64_t end) {
    const Ahead first{&plan.items[begin].tile, std::max<int64_t>(0, plan.items[begin].segment)};
    for (int64_t i = 0; i < kSegmentKeys / p.keys.page_size; ++i) prefetch_block<T>(p, first, p.keys.k_pages, i);
    for (int64_t i = begin; i < end; ++i) {
      run_item<T>(p, plan.items[i], i + 1 < end ? &plan.items[i + 1] : nullptr, plan.parked.data(), scratch());
    }
  });
  merge_parked(p, plan, scratch());
}

// Rows that no sequence covers.
void clear_padding(const PagedKeys& keys, float* out, int64_t tokens, int64_t row_size) {
  thread_local std::vector<uint8_t> covered;
  covered.assign(tokens, 0);
  for (int64_t i = 0; i < keys.num_sequences; ++i)
    std::fill_n(covered.begin() + keys.sequences[i].first, keys.sequences[i].count, uint8_t{1});
  for (int64_t t = 0; t < tokens; ++t) {
    if (!covered[t]) std::fill_n(out + t * row_size, row_size, 0.0f);
  }
}

}  // namespace

void paged_attention(const PagedKeys& keys, const float* q, float* out, int64_t tokens, int64_t query_heads,
                     float scale) {
  const int64_t width = (keys.head_dim + kLanes - 1) / kLanes * kLanes;
  const Problem p{keys, q, out, query_heads, query_heads / keys.kv_heads, width, width + kLanes, scale};
  clear_padding(keys, out, tokens, query_heads * keys.head_dim);
  switch (keys.type) {
    case CacheType::f32: return attend<float>(p);
    case CacheType::f16: return attend<F16>(p);
    case CacheType::bf16: return attend<BF16>(p);
    case CacheType::i8: return attend<I8>(p);
  }
}

}  // namespace trnc
