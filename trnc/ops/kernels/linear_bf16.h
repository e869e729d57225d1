// bf16 weights times rows of f32 by the matrix unit, however few the rows are, so that a row has the same bits in every
// batch: those of the unit, which adds up products of bf16 in f32, in an order of its own.
//
// A row goes in as two bf16, rounded from it and from what the first leaves of it, so that 17 bits of 24 are multiplied.
#pragma once

#include "buffer.h"
#include "matrix_unit.h"
#include "parallel.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

namespace trnc {

constexpr int64_t kStep = 32;                    // in features that the unit multiplies at once
constexpr int64_t kStepBytes = kStep * kTileWidth * 2;  // of a weight tile
constexpr int64_t kUnitRows = 16;
constexpr int64_t kAheadBytes = 4096;            // weights asked for ahead of their use; hardware looks less far
constexpr int64_t kStreamProducts = 1 << 17;     // multiplications that are worth waking a thread for
constexpr int64_t kChunkStrips = 16;             // strips that stay in the second cache while tiles stream

// Rows in strips of 16, or one strip of fewer. Each step of a strip has the first parts of its rows, then the rests.
struct SplitRows {
  Buffer<uint16_t> parts;
  int64_t room = 0, strips = 0, steps = 0;

  void fit(int64_t rows, int64_t in_features) {
    room = std::min(rows, kUnitRows);
    strips = (rows + kUnitRows - 1) / kUnitRows;
    steps = (in_features + kStep - 1) / kStep;
    parts.resize(strips * steps * room * 2 * kStep);
  }
  uint16_t* first(int64_t strip, int64_t step) { return parts.data() + (strip * steps + step) * room * 2 * kStep; }
  uint16_t* rest(int64_t strip, int64_t step) { return first(strip, step) + room * kStep; }
};

// x rounded to bf16, ties to even.
inline F32x16 to_bf16(F32x16 x) {
  const I32x16 bits = as_int(x), even = shift_right<16>(bits) & broadcast(1);
  return as_float((bits + broadcast(0x7fff) + even) & broadcast(static_cast<int32_t>(0xffff0000)));
}

inline void store_bf16(uint16_t* to, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(shift_right<16>(as_int(x)).v));
}

// Splits row `row` of `x` [in_features], zeros after its end.
inline void split_row(const float* x, int64_t in_features, SplitRows& rows, int64_t row) {
  const int64_t strip = row / kUnitRows, place = row % kUnitRows;
  for (int64_t i = 0; i < rows.steps * kStep; i += kLanes) {
    const int64_t at = place * kStep + i % kStep;
    const F32x16 value = load_n(x + i, static_cast<int>(std::clamp<int64_t>(in_features - i, 0, kLanes)));
    const F32x16 first = to_bf16(value);
    store_bf16(rows.first(strip, i / kStep) + at, first);
    store_bf16(rows.rest(strip, i / kStep) + at, to_bf16(value - first));
  }
}

// The sums of a tile's products with the first parts of a strip, and with the rests.
struct alignas(64) PartSums {
  float first[kUnitRows * kTileWidth], rest[kUnitRows * kTileWidth];
};

// Adds the products of T tiles' steps, `stride` bytes apart, with one step of a strip.
template <int T>
inline void add_step(const uint8_t* w, int64_t stride, SplitRows& rows, int64_t strip, int64_t step) {
  tile_load<3>(rows.first(strip, step));
  tile_load<7>(rows.rest(strip, step));
  tile_load<2>(w);
  tile_add_bf16<0, 3, 2>();
  tile_add_bf16<1, 7, 2>();
  if constexpr (T == 2) {
    tile_load<6>(w + stride);
    tile_add_bf16<4, 3, 6>();
    tile_add_bf16<5, 7, 6>();
  }
}

template <int T>
void multiply_strip(const uint8_t* w, int64_t size, SplitRows& rows, int64_t strip, PartSums (&sums)[2]) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<4>(), tile_zero<5>();
  const int64_t whole = size / kStepBytes, left = size % kStepBytes;
  for (int64_t step = 0; step < whole; ++step) {
    for (int t = 0; t < T; ++t) prefetch(w + t * size + step * kStepBytes + kAheadBytes, kStepBytes);
    add_step<T>(w + step * kStepBytes, size, rows, strip, step);
  }
  if (left) {  // a step that the tile ends in; what follows it in memory may be a NaN
    alignas(64) uint8_t last[T][kStepBytes] = {};
    for (int t = 0; t < T; ++t) std::memcpy(last[t], w + t * size + whole * kStepBytes, left);
    add_step<T>(last[0], kStepBytes, rows, strip, whole);
  }
  tile_store<0>(sums[0].first), tile_store<1>(sums[0].rest);
  if constexpr (T == 2) tile_store<4>(sums[1].first), tile_store<5>(sums[1].rest);
}

template <int T>
void multiply_strips(const Linear& op, int64_t size, SplitRows& rows, int64_t tile, int64_t begin, int64_t end) {
  PartSums sums[2];
  for (int64_t strip = begin; strip < end; ++strip) {
    multiply_strip<T>(op.weight + tile * size, size, rows, strip, sums);
    const int64_t first = strip * kUnitRows, count = std::min(kUnitRows, op.rows - first);
    for (int64_t r = 0; r < count; ++r) {
      for (int t = 0; t < T; ++t) {
        finish(op, first + r, tile + t, load(sums[t].first + r * kTileWidth) + load(sums[t].rest + r * kTileWidth));
      }
    }
  }
}

inline void linear_bf16_by_matrix(const Linear& op) {
  static thread_local SplitRows of_thread;
  SplitRows& rows = of_thread;
  rows.fit(op.rows, op.in_features);
  parallel_for(op.rows, std::max<int64_t>(1, kStreamProducts / 8 / op.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) split_row(op.x + row * op.in_features, op.in_features, rows, row);
  });
  const int64_t size = tile_bytes(Format::bf16, op.in_features), pairs = (op.tiles() + 1) / 2;
  const int64_t chunks = (rows.strips + kChunkStrips - 1) / kChunkStrips;
  const int64_t products = op.in_features * kTileWidth * 2 * std::min(op.rows, kChunkStrips * kUnitRows);
  parallel_for(pairs * chunks, std::max<int64_t>(1, kStreamProducts / products), [&](int64_t begin, int64_t end) {
    const MatrixUnit unit(2 * kStep, static_cast<int>(rows.room));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = i % pairs * 2, strip = i / pairs * kChunkStrips;
      const int64_t stop = std::min(rows.strips, strip + kChunkStrips);
      if (tile + 2 <= op.tiles()) multiply_strips<2>(op, size, rows, tile, strip, stop);
      else multiply_strips<1>(op, size, rows, tile, strip, stop);
    }
    if (op.streams) stream_fence();
  });
}

}  // namespace trnc

#endif
