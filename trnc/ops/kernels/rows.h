// What is computed on one row before it is multiplied: RMSNorm and the gated SiLU.
#pragma once

#include <cmath>

#include "simd.h"

namespace trnc {

// Two accumulators, even and odd vectors, added at the end.
inline float sum_of_squares(const float* x, int64_t width) {
  F32x16 even = broadcast(0.0f), odd = broadcast(0.0f);
  for (int64_t i = 0; i < width; i += 2 * kLanes) {
    const F32x16 a = load_n(x + i, static_cast<int>(width - i));
    even = fma(a, a, even);
    if (i + kLanes < width) {
      const F32x16 b = load_n(x + i + kLanes, static_cast<int>(width - i - kLanes));
      odd = fma(b, b, odd);
    }
  }
  return reduce_add(even + odd);
}

// out = x / sqrt(mean(x^2) + eps) * weight, [width] each.
inline void rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t width) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const F32x16 scale = broadcast(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i);
    store_n(out + i, load_n(x + i, n) * scale * load_n(weight + i, n), n);
  }
}

inline F32x16 silu_mul(F32x16 gate, F32x16 up) {
  return gate / (broadcast(1.0f) + exp(broadcast(0.0f) - gate)) * up;
}

// out = silu(gate) * up, [width], of a row that holds the gate and then up.
inline void silu_mul_row(const float* gate_up, float* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i);
    store_n(out + i, silu_mul(load_n(gate_up + i, n), load_n(gate_up + width + i, n)), n);
  }
}

}  // namespace trnc
