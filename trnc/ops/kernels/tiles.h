// What the linear kernels share: turning a row count known at run time into a template argument, the norm before and what
// comes after.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "rows.h"

namespace trnc {

// Calls fn(std::integral_constant<int, rows>{}) for 1 <= rows <= Max.
template <int Max, class Fn>
void with_rows(int64_t rows, Fn&& fn) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, std::forward<Fn>(fn));
  }
  fn(std::integral_constant<int, Max>{});
}

// Row `row` of x after the norm, in place or in `scratch` [in_features].
inline const float* prepare_row(const Linear& op, int64_t row, float* scratch) {
  const float* x = op.x + row * op.in_features;
  if (!op.norm) return x;
  rms_norm_row(x, op.norm, op.eps, scratch, op.in_features);
  return scratch;
}

// Adds the bias and the residual and stores one row of one tile.
inline void finish(const Linear& op, int64_t row, int64_t tile, F32x16 acc) {
  const int64_t column = tile * kTileWidth, at = row * op.out_features + column;
  const int width = static_cast<int>(std::min(kTileWidth, op.out_features - column));
  if (op.bias) acc = acc + load_n(op.bias + column, width);
  if (op.residual) acc = load_n(op.residual + at, width) + acc;
  op.streams ? stream(op.out + at, acc) : store_n(op.out + at, acc, width);
}

// The same for a tile of the gate and the one of up that belongs to it; the gate fills its tiles.
inline void finish_gated(const Linear& op, int64_t row, int64_t tile, F32x16 gate, F32x16 up) {
  const int64_t column = tile * kTileWidth, width = op.out_width();
  if (op.bias) {
    gate = gate + load(op.bias + column);
    up = up + load(op.bias + width + column);
  }
  float* const at = op.out + row * width + column;
  op.streams ? stream(at, silu_mul(gate, up)) : store(at, silu_mul(gate, up));
}

// The same product with stores that suit it. The rows of a tile lie far apart, mostly in the same few cache sets, so
// where the caches cannot hold the outputs anyway, storing past them saves reading them first. Needs whole, aligned
// vectors.
inline Linear with_streams(const Linear& op) {
  constexpr int64_t kManyBytes = 1 << 20;
  Linear result = op;
  result.streams = op.rows * op.out_width() * 4 > kManyBytes && op.out_width() % kLanes == 0 &&
                   reinterpret_cast<uintptr_t>(op.out) % 64 == 0;
  return result;
}

}  // namespace trnc
