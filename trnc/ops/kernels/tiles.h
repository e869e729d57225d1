// What the linear kernels share: turning a row count known at run time into a template argument, and the
// epilogue.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "simd.h"

namespace trnc {

// Calls fn(std::integral_constant<int, rows>{}) for 1 <= rows <= Max.
template <int Max, class Fn>
void with_rows(int64_t rows, Fn&& fn) {
  if constexpr (Max > 1) {
    if (rows < Max) return with_rows<Max - 1>(rows, std::forward<Fn>(fn));
  }
  fn(std::integral_constant<int, Max>{});
}

// Adds the bias and stores one row of one tile.
inline void finish(const Linear& op, int64_t row, int64_t tile, F32x16 acc) {
  const int64_t column = tile * kTileWidth;
  const int width = static_cast<int>(std::min(kTileWidth, op.out_features - column));
  if (op.bias) acc = acc + load_n(op.bias + column, width);
  store_n(op.out + row * op.out_features + column, acc, width);
}

}  // namespace trnc
