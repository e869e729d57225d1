// Attention over keys and values of int8, in integers.
//
// A query row is rounded to 16 bits over its largest magnitude; the weights of a segment, each times the scale of its
// value, to 15 bits over the largest of them. Both are two digits of a byte, 256 * high + low, whose products with the
// cached bytes add up exactly for each digit. So a score and an output are the same bits in whatever order, by
// whatever instruction and beside whichever rows they were added up.
//
// Keys after a row's position have the weight 0: what lies there is multiplied with, and leaves no trace.
#pragma once

#include <cstring>

#include "attention_tile.h"
#include "matrix_unit.h"
#include "rounding.h"
#include "softmax.h"
#include "tiles.h"

namespace trnc {

constexpr int kDigitRows = kWide ? 6 : 2;     // register tile: rows ...
constexpr int kDigitVectors = kWide ? 2 : 1;  // ... times vectors
constexpr float kQueryLargest = 127.0f * 256.0f;
constexpr float kWeightLargest = 32767.0f;

// Digits of some rows, each byte next to the other's in `stride`.
struct Digits {
  Buffer<uint8_t> high, low;
  int64_t stride = 0;

  void fit(int64_t rows, int64_t width) {
    stride = width;
    grow(high, rows * width);
    grow(low, rows * width);
  }
  // Stores 16 values from their integers; the low digit is the rest modulo 256.
  void put(int64_t at, I32x16 value, I32x16 top) {
    store_i8(reinterpret_cast<int8_t*>(high.data() + at), top);
    store_i8(reinterpret_cast<int8_t*>(low.data() + at), shift_right<24>(shift_left<24>(value)));
  }
};

struct Int8Scratch {
  Digits q, weights;
  Buffer<int32_t> corrections;  // of a row's scores, for the high and the low digits
  Buffer<float> q_scales, key_scales, value_scales, weight_scales;
  Buffer<uint8_t> keys, values;  // of a block, and of the blocks of a segment

  void fit(const Problem& p, int64_t rows) {
    q.fit(rows, p.width);
    weights.fit(rows, kSegmentKeys);
    grow(corrections, rows * 2);
    grow(q_scales, rows);
    grow(weight_scales, rows);
    grow(key_scales, p.keys.page_size);
    grow(value_scales, kSegmentKeys);
    grow(keys, p.width * p.keys.page_size);
    grow(values, p.width * kSegmentKeys);
  }
};

// Rounds the queries, [head_dim] each, `width` apart with zeros between.
inline void round_queries(const Problem& p, const Tile& tile, const float* q, Int8Scratch& s) {
  const int64_t d = p.keys.head_dim;
  for (int64_t row = 0; row < p.rows(tile); ++row) {
    const float* const x = q + row * d;
    const Rounding rounding = rounding_of(largest_magnitude(x, d), kQueryLargest);
    I32x16 high_sum = broadcast(0), low_sum = broadcast(0);
    for (int64_t i = 0; i < p.width; i += kLanes) {
      const I32x16 value = to_int(load_n(x + i, static_cast<int>(d - i)) * broadcast(rounding.inverse));
      const I32x16 high = shift_right<8>(value + broadcast(128));
      s.q.put(row * p.width + i, value, high);
      high_sum = high_sum + high;
      low_sum = low_sum + (value - shift_left<8>(high));
    }
    s.corrections[row * 2] = -kInt8Bias * reduce_add(high_sum);
    s.corrections[row * 2 + 1] = -kInt8Bias * reduce_add(low_sum);
    s.q_scales[row] = rounding.scale;
  }
}

// Rounds a row's weights of `valid` keys, and gives those after them, up to `end`, none.
inline void round_weights(const float* weights, int64_t row, int64_t valid, int64_t end, Int8Scratch& s) {
  float products[kScoreStride];
  for (int64_t i = 0; i < valid; i += kLanes) {
    const F32x16 product = load(weights + i) * load(s.value_scales.data() + i);
    store(products + i, select(first_lanes(static_cast<int>(valid - i)), product, broadcast(0.0f)));
  }
  const Rounding rounding = rounding_of(largest_magnitude(products, valid), kWeightLargest);
  const int64_t at = row * s.weights.stride;
  int64_t i = 0;
  for (; i < valid; i += kLanes) {
    const I32x16 value = to_int(load(products + i) * broadcast(rounding.inverse));
    s.weights.put(at + i, value, shift_right<8>(value));
  }
  for (; i < end; i += kLanes) s.weights.put(at + i, broadcast(0), broadcast(0));
  s.weight_scales[row] = rounding.scale;
}

// Keys times signed digits, and values times unsigned ones: as vectors and as tiles of the matrix unit.
struct KeyProduct {
  static Bytes64 read(const uint8_t* p) { return biased(load_bytes(p)); }
  static I32x16 add(I32x16 acc, Bytes64 keys, int32_t digits) { return dot_u8(acc, keys, digits); }
#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
  template <int Sum, int A, int B>
  static void add_tiles() { tile_add_signed<Sum, A, B>(); }
#endif
};
struct ValueProduct {
  static Bytes64 read(const uint8_t* p) { return load_bytes(p); }
  static I32x16 add(I32x16 acc, Bytes64 values, int32_t digits) { return dot_i8(acc, values, digits); }
#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
  template <int Sum, int A, int B>
  static void add_tiles() { tile_add_unsigned<Sum, A, B>(); }
#endif
};

// A block as it is multiplied: quads of four coordinates of a key, or of four values, `stride` bytes apart.
struct Quads {
  const uint8_t* data;
  int64_t stride, count;
};

// Blocks that are multiplied with the digits of a row, one after the other from `at` on.
struct Blocks {
  const Quads* first;
  int64_t count, at;
};

inline int32_t read_quad(const uint8_t* p) {
  int32_t quad;
  std::memcpy(&quad, p, sizeof quad);
  return quad;
}

// The sums of R rows from `row` on and V vectors of columns from `column` on: of the high and of the low digits they
// start from what `corrections` has for the row, where there are any, and end(row, column, high, low) takes them. It is
// a copy, for a reference could change with every store.
template <class Product, int R, int V, class End>
void multiply_digits(const Digits& a, Blocks b, const int32_t* corrections, int64_t row, int64_t column, End end) {
  I32x16 high[R][V], low[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      high[r][v] = broadcast(corrections ? corrections[(row + r) * 2] : 0);
      low[r][v] = broadcast(corrections ? corrections[(row + r) * 2 + 1] : 0);
    }
  const uint8_t* digits = a.high.data() + row * a.stride + b.at;
  const int64_t to_low = a.low.data() - a.high.data();
  for (const Quads* block = b.first; block < b.first + b.count; ++block) {
    const uint8_t* from = block->data + column * 4;
    for (int64_t i = 0; i < block->count; ++i, digits += 4, from += block->stride) {
      Bytes64 x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = Product::read(from + v * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int32_t h = read_quad(digits + r * a.stride), l = read_quad(digits + r * a.stride + to_low);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          high[r][v] = Product::add(high[r][v], x[v], h);
          low[r][v] = Product::add(low[r][v], x[v], l);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) end(row + r, column + v * kLanes, high[r][v], low[r][v]);
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

constexpr int64_t kUnitRows = 16;

// Bytes of a row that the matrix unit multiplies at once, 0 where it cannot multiply blocks of `quads`.
inline int64_t unit_bytes(int64_t quads) {
  if (!has_matrix_unit()) return 0;
  return quads < 16 ? quads * 4 : quads % 16 == 0 ? 64 : 0;
}

// The same sums of 16 rows and 32 columns, of tiles of `bytes`; it needs no corrections.
template <class Product, class End>
void multiply_tiles(const Digits& a, Blocks b, int64_t bytes, int64_t row, int64_t column, End end) {
  alignas(64) int32_t sums[4][kUnitRows * kLanes];
  tile_zero<0>(), tile_zero<1>(), tile_zero<4>(), tile_zero<5>();
  int64_t at = row * a.stride + b.at;
  for (const Quads* block = b.first; block < b.first + b.count; ++block) {
    const uint8_t* from = block->data + column * 4;
    for (int64_t i = 0; i < block->count; i += bytes / 4, at += bytes, from += bytes / 4 * block->stride) {
      tile_load<3>(a.high.data() + at, a.stride);
      tile_load<7>(a.low.data() + at, a.stride);
      tile_load<2>(from, block->stride);
      Product::template add_tiles<0, 3, 2>();
      Product::template add_tiles<1, 7, 2>();
      tile_load<6>(from + 64, block->stride);
      Product::template add_tiles<4, 3, 6>();
      Product::template add_tiles<5, 7, 6>();
    }
  }
  tile_store<0>(sums[0]), tile_store<1>(sums[1]), tile_store<4>(sums[2]), tile_store<5>(sums[3]);
  for (int64_t r = 0; r < kUnitRows; ++r) {
    end(row + r, column, load(sums[0] + r * kLanes), load(sums[1] + r * kLanes));
    end(row + r, column + kLanes, load(sums[2] + r * kLanes), load(sums[3] + r * kLanes));
  }
}

// Multiplies what it can of rows begin_row..end_row-1; returns the first row that is left.
template <class Product, class End>
int64_t multiply_by_unit(const Digits& a, Blocks b, int64_t begin_row, int64_t end_row, int64_t columns, End end) {
  const int64_t bytes = unit_bytes(b.first->count);
  if (end_row - begin_row < kUnitRows || columns % 32 != 0 || bytes == 0) return begin_row;
  const MatrixUnit unit(static_cast<int>(bytes));
  int64_t row = begin_row;
  for (; row + kUnitRows <= end_row; row += kUnitRows) {
    for (int64_t column = 0; column < columns; column += 32) multiply_tiles<Product>(a, b, bytes, row, column, end);
  }
  return row;
}

#endif

// The sums of rows begin_row..end_row-1 and `columns` columns, a multiple of 16.
template <class Product, class End>
void multiply_rows(const Digits& a, Blocks b, const int32_t* corrections, int64_t begin_row, int64_t end_row,
                   int64_t columns, End end) {
#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
  begin_row = multiply_by_unit<Product>(a, b, begin_row, end_row, columns, end);
#endif
  for (int64_t row = begin_row; row < end_row; row += kDigitRows) {
    with_rows<kDigitRows>(end_row - row, [&](auto rows) {
      int64_t column = 0;
      for (; column + kDigitVectors * kLanes <= columns; column += kDigitVectors * kLanes)
        multiply_digits<Product, rows, kDigitVectors>(a, b, corrections, row, column, end);
      for (; column < columns; column += kLanes)
        multiply_digits<Product, rows, 1>(a, b, corrections, row, column, end);
    });
  }
}

inline F32x16 join_digits(I32x16 high, I32x16 low) { return fma(to_float(high), broadcast(256.0f), to_float(low)); }

inline const uint8_t* page_bytes(const Problem& p, const Tile& tile, const void* pages, int64_t block) {
  return static_cast<const uint8_t*>(pages) + p.page_offset(tile, block);
}

// The quads of a block's first `end` keys: of a whole page in place, else gathered in scratch.
inline Quads key_quads(const Problem& p, const Tile& tile, int64_t block, int64_t end, Int8Scratch& s) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size;
  const int64_t own = first_own_key(p, tile, block, end);
  const uint8_t* const page = own > 0 ? page_bytes(p, tile, p.keys.k_pages, block) : nullptr;
  if (page) std::memcpy(s.key_scales.data(), page + d * size, size * sizeof(float));
  if (own == size) return {page, size * 4, d / 4};
  if (page) std::memcpy(s.keys.data(), page, d * size);
  for (int64_t key = own; key < end; ++key) {
    const auto* row = static_cast<const uint8_t*>(p.keys.k_new) + own_row(p, tile, block, key);
    for (int64_t i = 0; i < d; i += 4) std::memcpy(s.keys.data() + i * size + key * 4, row + i, 4);
    std::memcpy(&s.key_scales[key], row + d, sizeof(float));
  }
  return {s.keys.data(), size * 4, d / 4};
}

// Writes n quads of one byte of each row.
inline void interleave(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d, uint8_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t quad = a[i] | b[i] << 8 | c[i] << 16 | static_cast<uint32_t>(d[i]) << 24;
    std::memcpy(to + i * 4, &quad, sizeof quad);
  }
}

// The same for values: gathered at `room`, and their scales read into `scales`.
inline Quads value_quads(const Problem& p, const Tile& tile, int64_t block, int64_t end, uint8_t* room, float* scales) {
  const int64_t d = p.keys.head_dim, size = p.keys.page_size;
  const int64_t own = first_own_key(p, tile, block, end);
  const uint8_t* const page = own > 0 ? page_bytes(p, tile, p.keys.v_pages, block) : nullptr;
  if (page) std::memcpy(scales, page + d * size, size * sizeof(float));
  if (own == size && p.width == d) return {page, d * 4, size / 4};
  for (int64_t key = 0; key < own; key += 4) std::memcpy(room + key * p.width, page + key * d, d * 4);
  const auto row = [&](int64_t key) {
    return static_cast<const uint8_t*>(p.keys.v_new) + own_row(p, tile, block, key);
  };
  for (int64_t key = own, n; key < end; key += n) {
    uint8_t* const to = room + key / 4 * 4 * p.width + key % 4;
    n = key % 4 == 0 && key + 4 <= end ? 4 : 1;
    if (n == 4) interleave(row(key), row(key + 1), row(key + 2), row(key + 3), to, d);
    else for (int64_t i = 0; i < d; ++i) to[i * 4] = row(key)[i];
  }
  for (int64_t key = own; key < end; ++key) std::memcpy(scales + key, row(key) + d, sizeof(float));
  return {room, p.width * 4, size / 4};
}

// Scores a block of keys for the rows begin.. that have reached it.
inline void score_keys(const Problem& p, const Tile& tile, int64_t begin, Quads keys, float* scores, Int8Scratch& s) {
  const auto finish = [scores, key_scales = s.key_scales.data(), q_scales = s.q_scales.data()](
                          int64_t row, int64_t column, I32x16 high, I32x16 low) {
    const F32x16 score = join_digits(high, low) * load(key_scales + column);
    store(scores + row * kScoreStride + column, score * broadcast(q_scales[row]));
  };
  multiply_rows<KeyProduct>(s.q, {&keys, 1, 0}, s.corrections.data(), begin, p.rows(tile), p.keys.page_size, finish);
}

// The sums of weight * value of every row over the blocks of a segment.
inline void weigh_values(const Problem& p, const Tile& tile, const Quads* values, int64_t blocks, float* result,
                         Int8Scratch& s) {
  const auto finish = [result, stride = p.stride, scales = s.weight_scales.data()](int64_t row, int64_t column,
                                                                                   I32x16 high, I32x16 low) {
    store(result + row * stride + column, join_digits(high, low) * broadcast(scales[row]));
  };
  multiply_rows<ValueProduct>(s.weights, {values, blocks, 0}, nullptr, 0, p.rows(tile), p.width, finish);
}

// Leaves the softmax of each row over its keys in one segment: the largest score in `top`, the sums of weight * value and
// the lanes of the sum of weights in `result`. `scores` is scratch. Values are asked for while keys are multiplied, and
// the keys of what comes next before values are.
inline void attend_segment_int8(const Problem& p, const Tile& tile, int64_t segment, Ahead ahead, float* scores,
                                float* top, float* result, Int8Scratch& s) {
  const int64_t rows = p.rows(tile), size = p.keys.page_size, from = segment * kSegmentKeys, first = from / size;
  const int64_t blocks = std::min(kSegmentKeys / size, p.last_position(tile) / size + 1 - first);
  Quads values[kSegmentKeys / kLanes];
  for (int64_t i = 0; i < blocks; ++i) {
    const auto [begin, end] = reach(p, tile, first + i);
    prefetch_block<uint8_t>(p, {&tile, segment}, p.keys.v_pages, i);
    score_keys(p, tile, begin, key_quads(p, tile, first + i, end, s), scores + i * size, s);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t end = reach(p, tile, first + i).end;
    prefetch_block<uint8_t>(p, ahead, p.keys.k_pages, i);
    uint8_t* const room = s.values.data() + i * size * p.width;
    values[i] = value_quads(p, tile, first + i, end, room, s.value_scales.data() + i * size);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t valid = std::min(kSegmentKeys, p.position(tile, row) + 1 - from);
    float* const weights = scores + row * kScoreStride;
    top[row] = softmax(weights, valid, result + row * p.stride + p.width);
    round_weights(weights, row, std::max<int64_t>(0, valid), blocks * size, s);
  }
  weigh_values(p, tile, values, blocks, result, s);
}

}  // namespace trnc
