// What kernels of paged attention share: which rows make a tile, and where their keys and values lie.
#pragma once

#include <algorithm>

#include "attention.h"
#include "buffer.h"
#include "simd.h"

namespace trnc {

constexpr int64_t kScoreStride = kSegmentKeys + kLanes;  // of a row of scores

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

// The first of a block's keys 0..end - 1 that is the step's own; those before it are in the page.
inline int64_t first_own_key(const Problem& p, const Tile& tile, int64_t block, int64_t end) {
  return std::clamp<int64_t>(p.sequence(tile).start - block * p.keys.page_size, 0, end);
}

inline int64_t own_row(const Problem& p, const Tile& tile, int64_t block, int64_t key) {
  const Sequence& seq = p.sequence(tile);
  const int64_t token = seq.first + block * p.keys.page_size + key - seq.start;
  return (token * p.keys.kv_heads + tile.kv_head) * p.keys.row_size;
}

// Rows begin.. of a tile have reached a block; they need its keys 0..end - 1.
struct Reach {
  int64_t begin, end;
};

inline Reach reach(const Problem& p, const Tile& tile, int64_t block) {
  const int64_t size = p.keys.page_size, from = block * size;
  const int64_t late = std::max<int64_t>(0, from - p.position(tile, 0));
  return {late * p.group, std::min(size, p.last_position(tile) + 1 - from)};
}

// What is read after a segment: another one, of the same tile or of the next, or nothing.
struct Ahead {
  const Tile* tile;
  int64_t segment;
};

// Asks for one block of a segment, keys or values, if it is in a page. Each lies elsewhere in memory, so that hardware
// does not look ahead, and a step that has just begun with a segment waits longest.
template <class T>
[[gnu::always_inline]] inline void prefetch_block(const Problem& p, Ahead at, const void* pages, int64_t index) {
  const int64_t block = at.segment * (kSegmentKeys / p.keys.page_size) + index;
  if (!at.tile || block * p.keys.page_size >= p.sequence(*at.tile).start) return;
  const int64_t bytes = p.keys.row_size * p.keys.page_size * static_cast<int64_t>(sizeof(T));
  prefetch(static_cast<const T*>(pages) + p.page_offset(*at.tile, block), bytes);
}

}  // namespace trnc
