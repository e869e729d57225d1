// The one product that attention is made of, on keys and values in the dtype of the cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace trnc {

constexpr int kRows = 6;                 // register tile: rows ...
constexpr int kVectors = kWide ? 4 : 1;  // ... times vectors

struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };
struct I8 { int8_t value; };

// Whether a stored row of T ends with a scale.
template <class T>
constexpr bool kScaled = std::is_same_v<T, I8>;

// The scale that ends a stored row of `width` elements.
inline float scale_of(const I8* row, int64_t width) {
  float scale;
  std::memcpy(&scale, row + width, sizeof scale);
  return scale;
}

inline F32x16 widen(const float* p) { return load(p); }
inline F32x16 widen(const F16* p) { return load_f16(&p->bits); }
inline F32x16 widen(const BF16* p) { return load_bf16(&p->bits); }
inline F32x16 widen(const I8* p) { return load_i8(&p->value); }

template <class T>
F32x16 widen_n(const T* p, int n) {
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return widen(part);
}

// c[r, :] += sum over i of a[r, i] * b[i, :], for R rows and V vectors of columns.
template <int R, int V, class T>
void multiply_tile(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t n, float* c, int64_t ldc) {
  F32x16 acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load(c + r * ldc + v * kLanes);
  for (int64_t i = 0; i < n; ++i) {
    F32x16 x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = widen(b + i * ldb + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F32x16 y = broadcast(a[r * lda + i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] = fma(y, x[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

template <int V, class T>
void multiply_columns(int64_t rows, const float* a, int64_t lda, const T* b, int64_t ldb, int64_t n, float* c,
                      int64_t ldc) {
  for (; rows >= kRows; rows -= kRows, a += kRows * lda, c += kRows * ldc)
    multiply_tile<kRows, V>(a, lda, b, ldb, n, c, ldc);
  switch (rows) {
    case 5: return multiply_tile<5, V>(a, lda, b, ldb, n, c, ldc);
    case 4: return multiply_tile<4, V>(a, lda, b, ldb, n, c, ldc);
    case 3: return multiply_tile<3, V>(a, lda, b, ldb, n, c, ldc);
    case 2: return multiply_tile<2, V>(a, lda, b, ldb, n, c, ldc);
    case 1: return multiply_tile<1, V>(a, lda, b, ldb, n, c, ldc);
  }
}

// c [rows, columns] += a [rows, n] b [n, columns]; columns are a multiple of 16.
template <class T>
void multiply(int64_t rows, int64_t columns, const float* a, int64_t lda, const T* b, int64_t ldb, int64_t n,
              float* c, int64_t ldc) {
  int64_t at = 0;
  for (; at + kVectors * kLanes <= columns; at += kVectors * kLanes)
    multiply_columns<kVectors>(rows, a, lda, b + at, ldb, n, c + at, ldc);
  for (; kVectors > 2 && at + 2 * kLanes <= columns; at += 2 * kLanes)
    multiply_columns<2>(rows, a, lda, b + at, ldb, n, c + at, ldc);
  for (; at < columns; at += kLanes) multiply_columns<1>(rows, a, lda, b + at, ldb, n, c + at, ldc);
}

}  // namespace trnc
