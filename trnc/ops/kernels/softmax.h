// The softmax of one row of scores, as both kinds of attention take it.
#pragma once

#include <cstdint>
#include <limits>

#include "simd.h"

namespace trnc {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Turns a row's first `valid` scores into weights, none where valid <= 0. Stores the lanes of their sum
// and returns the largest score.
inline float softmax(float* scores, int64_t valid, float* sums) {
  const F32x16 nothing = broadcast(-kInfinity);
  F32x16 best = nothing;
  for (int64_t i = 0; i < valid; i += kLanes) {
    const F32x16 x = select(first_lanes(static_cast<int>(valid - i)), load(scores + i), nothing);
    store(scores + i, x);
    best = max(x, best);
  }
  const float top = reduce_max(best);
  F32x16 sum = broadcast(0.0f);
  for (int64_t i = 0; i < valid; i += kLanes) {
    const F32x16 weight = exp(load(scores + i) - broadcast(top));  // 0 in lanes after `valid`
    store(scores + i, weight);
    sum = sum + weight;
  }
  store(sums, sum);
  return top;
}

}  // namespace trnc
