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

#include "multiply.h"
#include "parallel.h"
#include "simd.h"
#include "softmax.h"

namespace trnc {
namespace {

constexpr int64_t kTileRows = 96;  // (query, head) rows that share a widened block
constexpr int64_t kScoreStride = kSegmentKeys + kLanes;

// Query rows of one sequence that share a key-value head: `queries` tokens from its token `query` on,
// times the heads of the group. Row i is token query + i / group, head i % group of the group.
struct Tile {
  int32_t sequence, kv_head, query, queries;
};

struct Problem {
  const PagedKeys& keys;
  const float* q;
  float* out;
  int64_t query_heads, group;
  int64_t width;   // head_dim rounded up to whole vectors
  int64_t stride;  // of a row of results: its output and the lanes of its sum of weights
  float scale;

  const Sequence& sequence(const Tile& t) const { return keys.sequences[t.sequence]; }
  int64_t rows(const Tile& t) const { return t.queries * group; }
  int64_t position(const Tile& t, int64_t row) const { return sequence(t).start + t.query + row / group; }
  int64_t last_position(const Tile& t) const { return sequence(t).start + t.query + t.queries - 1; }
  int64_t segments(const Tile& t) const { return last_position(t) / kSegmentKeys + 1; }
  int64_t offset(const Tile& t, int64_t row) const {  // of a row in q and out
    const int64_t token = sequence(t).first + t.query + row / group;
    return (token * query_heads + t.kv_head * group + row % group) * keys.head_dim;
  }
  int64_t page_offset(const Tile& t, int64_t block) const {  // of a block in k_pages and v_pages
    const int64_t page = keys.block_tables[t.sequence * keys.table_width + block];
    return (page * keys.kv_heads + t.kv_head) * keys.row_size * keys.page_size;
  }
};

template <class T>
void grow(std::vector<T>& buffer, int64_t n) {
  if (static_cast<int64_t>(buffer.size()) < n) buffer.resize(n);
}

// What a thread needs to run one tile. The softmax of row i over some keys is `top[i]`, their largest
// score, and `result[i]`: the sums of weight * value and of weight, where a weight is exp(score - top).
struct Scratch {
  std::vector<float> q, block, scales, row, scores, top, result, merged_top, merged;

  void fit(const Problem& p, int64_t rows) {
    grow(q, rows * p.keys.head_dim);
    grow(block, p.width * p.keys.page_size);
    grow(scales, p.keys.page_size);
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

// Keys or values of one block: rows `data + i * stride`, to be multiplied by the scale of each key if there are any.
template <class T>
struct Block {
  const T* data;
  int64_t stride;
  const float* scales;
};

// The first of a block's keys 0..end - 1 that is the step's own; those before it are in the page.
int64_t first_own_key(const Problem& p, const Tile& tile, int64_t block, int64_t end) {
  return std::clamp<int64_t>(p.sequence(tile).start - block * p.keys.page_size, 0, end);
}

int64_t own_row(const Problem& p, const Tile& tile, int64_t block, int64_t key) {
  const Sequence& seq = p.sequence(tile);
  const int64_t token = seq.first + block * p.keys.page_size + key - seq.start;
  return (token * p.keys.kv_heads + tile.kv_head) * p.keys.row_size;
}

// Widens the first `end` keys of a block into scratch, [head_dim, page_size]: those before the
// sequence's start from its page, the others from the step's rows. Later lanes keep what they held.
template <class T>
Block<float> gather_keys(const Problem& p, const Tile& tile, int64_t block, int64_t end, Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size;
  const int64_t own = first_own_key(p, tile, block, end);
  if (own > 0) {
    const T* page = static_cast<const T*>(p.keys.k_pages) + p.page_offset(tile, block);
    for (int64_t i = 0; i < d * size; i += kLanes) store(s.block.data() + i, widen(page + i));
    if constexpr (kScaled<T>) std::memcpy(s.scales.data(), page + d * size, size * sizeof(float));
  }
  for (int64_t key = own; key < end; ++key) {
    const T* row = static_cast<const T*>(p.keys.k_new) + own_row(p, tile, block, key);
    widen_row(row, s.row.data(), d);
    for (int64_t i = 0; i < d; ++i) s.block[i * size + key] = s.row[i];
    if constexpr (kScaled<T>) s.scales[key] = scale_of(row, d);
  }
  return {s.block.data(), size, kScaled<T> ? s.scales.data() : nullptr};
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
    if constexpr (kScaled<T>) s.scales[key] = scale_of(row, d);
  }
  return {s.block.data(), p.width, kScaled<T> ? s.scales.data() : nullptr};
}

// A block of keys, or of values, as its page holds them.
template <class T>
Block<T> keys_in_page(const Problem& p, const Tile& tile, int64_t block, Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size;
  const T* page = static_cast<const T*>(p.keys.k_pages) + p.page_offset(tile, block);
  if constexpr (!kScaled<T>) return {page, size, nullptr};
  std::memcpy(s.scales.data(), page + d * size, size * sizeof(float));
  return {page, size, s.scales.data()};
}

template <class T>
Block<T> values_in_page(const Problem& p, const Tile& tile, int64_t block, Scratch& s) {
  const int64_t stride = p.keys.row_size;
  const T* page = static_cast<const T*>(p.keys.v_pages) + p.page_offset(tile, block);
  if constexpr (kScaled<T>) {
    for (int64_t key = 0; key < p.keys.page_size; ++key) s.scales[key] = scale_of(page + key * stride, p.keys.head_dim);
  }
  return {page, stride, kScaled<T> ? s.scales.data() : nullptr};
}

// Multiplies what `rows` rows have for each key of a block, scores or weights, by the key's scale.
void scale_keys(const Problem& p, const float* scales, int64_t rows, float* values) {
  for (int64_t row = 0; row < rows; ++row, values += kScoreStride) {
    for (int64_t i = 0; i < p.keys.page_size; i += kLanes) store(values + i, load(values + i) * load(scales + i));
  }
}

// Rows begin.. of a tile have reached a block; they need its keys 0..end - 1.
struct Reach {
  int64_t begin, end;
};

Reach reach(const Problem& p, const Tile& tile, int64_t block) {
  const int64_t size = p.keys.page_size, from = block * size;
  const int64_t late = std::max<int64_t>(0, from - p.position(tile, 0));
  return {late * p.group, std::min(size, p.last_position(tile) + 1 - from)};
}

// Scores a block of keys for the rows begin.. that have reached it.
template <class T>
void score_block(const Problem& p, const Tile& tile, int64_t begin, Block<T> keys, float* scores, Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size, rows = p.rows(tile);
  for (int64_t row = begin; row < rows; ++row) std::fill_n(scores + row * kScoreStride, size, 0.0f);
  multiply(rows - begin, size, s.q.data() + begin * d, d, keys.data, keys.stride, d,
           scores + begin * kScoreStride, kScoreStride);
  if (keys.scales) scale_keys(p, keys.scales, rows - begin, scores + begin * kScoreStride);
}

// Adds a block of values, weighted, to the results of the rows begin.. that have reached it.
template <class T>
void weigh_block(const Problem& p, const Tile& tile, int64_t block, int64_t begin, Block<T> values,
                 float* weights, Scratch& s) {
  const int64_t size = p.keys.page_size, rows = p.rows(tile);
  if (values.scales) scale_keys(p, values.scales, rows - begin, weights + begin * kScoreStride);
  for (int64_t row = begin, end; row < rows; row = end) {
    const int64_t valid = std::min(size, p.position(tile, row) + 1 - block * size);
    end = valid == size ? rows : row + p.group;  // rows that have passed the block go together
    multiply(end - row, p.width, weights + row * kScoreStride, kScoreStride, values.data, values.stride, valid,
             s.result.data() + row * p.stride, p.stride);
  }
}

// Asks for a block's keys or values: each lies elsewhere in memory, so hardware does not look ahead.
template <class T>
[[gnu::always_inline]] inline void prefetch_page(const Problem& p, const Tile& tile, const void* pages, int64_t block) {
  if (block * p.keys.page_size >= p.sequence(tile).start) return;
  const int64_t bytes = p.keys.row_size * p.keys.page_size * static_cast<int64_t>(sizeof(T));
  prefetch(static_cast<const T*>(pages) + p.page_offset(tile, block), bytes);
}

// Leaves in scratch the softmax of each row over its keys in one segment.
template <class T>
void attend_segment(const Problem& p, const Tile& tile, int64_t segment, Scratch& s) {
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
    block < last ? prefetch_page<T>(p, tile, p.keys.k_pages, block + 1) : prefetch_page<T>(p, tile, p.keys.v_pages, first);
    if (in_place(block)) {
      score_block(p, tile, begin, keys_in_page<T>(p, tile, block, s), scores, s);
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
    if (block < last) prefetch_page<T>(p, tile, p.keys.v_pages, block + 1);
    if (in_place(block)) {
      weigh_block(p, tile, block, begin, values_in_page<T>(p, tile, block, s), weights, s);
    } else {
      weigh_block(p, tile, block, begin, gather_values<T>(p, tile, block, end, s), weights, s);
    }
  }
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
  std::vector<float> parked;  // for each segment of a cut tile: its rows' results, then their tops
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
void run_item(const Problem& p, const Item& item, float* parked, Scratch& s) {
  const int64_t rows = p.rows(item.tile);
  s.fit(p, rows);
  load_queries(p, item.tile, s.q.data());
  if (item.segment >= 0) {
    attend_segment<T>(p, item.tile, item.segment, s);
    std::copy_n(s.result.data(), rows * p.stride, parked + item.parked);
    std::copy_n(s.top.data(), rows, parked + item.parked + rows * p.stride);
    return;
  }
  begin_merge(p, rows, s);
  for (int64_t segment = 0; segment < p.segments(item.tile); ++segment) {
    attend_segment<T>(p, item.tile, segment, s);
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
    for (int64_t i = begin; i < end; ++i) run_item<T>(p, plan.items[i], plan.parked.data(), scratch());
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
