// All heads share one key a token, so (query, head) rows of a sequence are simply numbered through and cut into tiles. The
// arithmetic of a row is that of attention.cpp: segments of kSegmentKeys by absolute position, each with a softmax of its
// own; a score adds up over the latent in sequence, an output over keys in sequence, and segments are merged in order.
// How rows are cut into tiles decides only speed.
#include "latent.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "buffer.h"
#include "multiply.h"
#include "parallel.h"
#include "simd.h"
#include "softmax.h"

namespace trnc {
namespace {

constexpr int64_t kTileRows = 96;  // rows that share the widened keys of a segment
constexpr int64_t kScoreStride = kSegmentKeys + kLanes;

int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

struct Problem {
  const PagedKeys& keys;
  const float* q;
  float* out;
  int64_t heads, rank;
  float scale;

  int64_t width() const { return keys.head_dim; }
  int64_t stride() const { return whole_vectors(rank) + kLanes; }  // of a result: its output and the lanes of its sum
};

// Rows begin..begin + rows - 1 of a sequence; row i is token i / heads, head i % heads.
struct Tile {
  const Sequence* sequence;
  const int32_t* table;
  int64_t begin, rows;
};

// Of row `row` of a tile.
int64_t position(const Problem& p, const Tile& tile, int64_t row) {
  return tile.sequence->start + (tile.begin + row) / p.heads;
}

struct Scratch {
  Buffer<float> q, keys, latents, scores, top, result, merged_top, merged;

  void fit(const Problem& p, int64_t rows) {
    q.resize(rows * p.width());
    keys.resize(p.width() * kSegmentKeys);                      // [width, keys]
    latents.resize(kSegmentKeys * whole_vectors(p.width()));  // [keys, width in whole vectors]
    scores.resize(rows * kScoreStride);
    top.resize(rows);
    result.resize(rows * p.stride());
    merged_top.assign(rows, -kInfinity);
    merged.assign(rows * p.stride(), 0.0f);
  }
};

template <class T>
void widen_row(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, n - i));
    store_n(to + i, count == kLanes ? widen(from + i) : widen_n(from + i, count), count);
  }
}

// Widens keys from..from + count - 1 of a sequence: those before its start from pages, the others from the step's rows.
// `keys` gets them turned; its lanes after `count` keep what they held.
template <class T>
void gather(const Problem& p, const Tile& tile, int64_t from, int64_t count, Scratch& s) {
  const int64_t width = p.width(), size = p.keys.page_size, stride = whole_vectors(width);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = from + i, own = at - tile.sequence->start;
    const int64_t place = own >= 0 ? tile.sequence->first + own : tile.table[at / size] * size + at % size;
    const T* row = static_cast<const T*>(own >= 0 ? p.keys.v_new : p.keys.v_pages) + place * p.keys.row_size;
    float* latent = s.latents.data() + i * stride;
    widen_row(row, latent, width);
    if constexpr (kScaled<T>) {
      const float scale = scale_of(row, width);
      for (int64_t j = 0; j < width; ++j) latent[j] *= scale;
    }
    for (int64_t j = 0; j < width; ++j) s.keys[j * kSegmentKeys + i] = latent[j];
  }
}

// Folds rows first..first + rows - 1, which have reached `valid` keys of the segment, into those before it.
void attend_rows(const Problem& p, int64_t first, int64_t rows, int64_t valid, Scratch& s) {
  const int64_t columns = whole_vectors(p.rank), stride = p.stride();
  for (int64_t row = first; row < first + rows; ++row) {
    float* result = s.result.data() + row * stride;
    std::fill_n(result, columns, 0.0f);
    s.top[row] = softmax(s.scores.data() + row * kScoreStride, valid, result + columns);
  }
  multiply(rows, columns, s.scores.data() + first * kScoreStride, kScoreStride, s.latents.data(), whole_vectors(p.width()),
           valid, s.result.data() + first * stride, stride);
  for (int64_t row = first; row < first + rows; ++row) {
    const float largest = std::max(s.merged_top[row], s.top[row]);
    const F32x16 before = exp(broadcast(s.merged_top[row] - largest)), here = exp(broadcast(s.top[row] - largest));
    float* merged = s.merged.data() + row * stride;
    for (int64_t i = 0; i < stride; i += kLanes)
      store(merged + i, fma(load(s.result.data() + row * stride + i), here, load(merged + i) * before));
    s.merged_top[row] = largest;
  }
}

template <class T>
void attend_segment(const Problem& p, const Tile& tile, int64_t from, Scratch& s) {
  const int64_t last = position(p, tile, tile.rows - 1), count = std::min(kSegmentKeys, last + 1 - from);
  gather<T>(p, tile, from, count, s);
  for (int64_t row = 0; row < tile.rows; ++row) std::fill_n(s.scores.data() + row * kScoreStride, kSegmentKeys, 0.0f);
  multiply(tile.rows, whole_vectors(count), s.q.data(), p.width(), s.keys.data(), kSegmentKeys, p.width(), s.scores.data(),
           kScoreStride);
  for (int64_t row = 0, end; row < tile.rows; row = end) {
    const int64_t valid = std::min(kSegmentKeys, position(p, tile, row) + 1 - from);
    // Rows with as many keys go together: those of one token, or all that have passed the segment.
    end = valid == kSegmentKeys ? tile.rows : std::min(tile.rows, ((tile.begin + row) / p.heads + 1) * p.heads - tile.begin);
    if (valid > 0) attend_rows(p, row, end - row, valid, s);
  }
}

template <class T>
void attend_tile(const Problem& p, const Tile& tile, Scratch& s) {
  s.fit(p, tile.rows);
  const int64_t first = tile.sequence->first * p.heads + tile.begin, width = p.width();
  for (int64_t i = 0; i < tile.rows * width; ++i) s.q[i] = p.q[first * width + i] * p.scale;
  for (int64_t from = 0; from <= position(p, tile, tile.rows - 1); from += kSegmentKeys) attend_segment<T>(p, tile, from, s);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const float* merged = s.merged.data() + row * p.stride();
    const F32x16 weights = broadcast(reduce_add(load(merged + whole_vectors(p.rank))));
    float* out = p.out + (first + row) * p.rank;
    for (int64_t i = 0; i < p.rank; i += kLanes)
      store_n(out + i, load(merged + i) / weights, static_cast<int>(std::min<int64_t>(kLanes, p.rank - i)));
  }
}

std::vector<Tile> make_tiles(const Problem& p) {
  int64_t total = 0;
  for (int64_t i = 0; i < p.keys.num_sequences; ++i) total += p.keys.sequences[i].count * p.heads;
  const int64_t share = (total / num_threads() + kRows - 1) / kRows * kRows;
  const int64_t size = std::clamp<int64_t>(share, kRows, kTileRows);
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < p.keys.num_sequences; ++i) {
    const Sequence& sequence = p.keys.sequences[i];
    const int64_t rows = sequence.count * p.heads;
    for (int64_t begin = 0; begin < rows; begin += size)
      tiles.push_back({&sequence, p.keys.block_tables + i * p.keys.table_width, begin, std::min(size, rows - begin)});
  }
  return tiles;
}

template <class T>
void attend(const Problem& p) {
  const std::vector<Tile> tiles = make_tiles(p);
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&p, &tiles](int64_t begin, int64_t end) {
    thread_local const auto scratch = std::make_unique<Scratch>();
    for (int64_t i = begin; i < end; ++i) attend_tile<T>(p, tiles[i], *scratch);
  });
}

template <class T>
void write_rows(const PagedKeys& keys) {
  for (int64_t i = 0; i < keys.num_sequences; ++i) {
    const Sequence& sequence = keys.sequences[i];
    for (int64_t row = 0; row < sequence.count; ++row) {
      const int64_t at = sequence.start + row, size = keys.page_size;
      const int64_t page = keys.block_tables[i * keys.table_width + at / size];
      std::copy_n(static_cast<const T*>(keys.v_new) + (sequence.first + row) * keys.row_size, keys.row_size,
                  static_cast<T*>(keys.v_pages) + (page * size + at % size) * keys.row_size);
    }
  }
}

}  // namespace

void latent_attention(const PagedKeys& keys, const float* q, float* out, int64_t tokens, int64_t query_heads, int64_t rank,
                      float scale) {
  std::fill_n(out, tokens * query_heads * rank, 0.0f);  // also of rows that no sequence covers
  const Problem p{keys, q, out, query_heads, rank, scale};
  switch (keys.type) {
    case CacheType::f32: return attend<float>(p);
    case CacheType::f16: return attend<F16>(p);
    case CacheType::bf16: return attend<BF16>(p);
    case CacheType::i8: return attend<I8>(p);
  }
}

void latent_write(const PagedKeys& keys) {
  switch (keys.type) {
    case CacheType::f32: return write_rows<uint32_t>(keys);
    case CacheType::i8: return write_rows<uint8_t>(keys);
    default: return write_rows<uint16_t>(keys);
  }
}

}  // namespace trnc
