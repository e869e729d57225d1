// rms_norm and silu_mul: small, bound by the call, so threads help only for many rows.
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace trnc {
namespace {

constexpr int64_t kGrain = 16384;  // elements that are worth waking a thread for

int64_t rows_per_span(int64_t width) { return width >= kGrain ? 1 : kGrain / width; }

// Two accumulators, even and odd vectors, added at the end.
float sum_of_squares(const float* x, int64_t width) {
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

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps) {
  parallel_for(rows, rows_per_span(width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* in = x + row * width;
      const float mean = sum_of_squares(in, width) / static_cast<float>(width);
      const F32x16 scale = broadcast(1.0f / std::sqrt(mean + eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        const int n = static_cast<int>(width - i);
        store_n(out + row * width + i, load_n(in + i, n) * scale * load_n(weight + i, n), n);
      }
    }
  });
}

void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width) {
  parallel_for(rows, rows_per_span(width), [=](int64_t begin, int64_t end) {
    const F32x16 one = broadcast(1.0f), zero = broadcast(0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const float* gate = gate_up + row * 2 * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int n = static_cast<int>(width - i);
        const F32x16 g = load_n(gate + i, n), up = load_n(gate + width + i, n);
        store_n(out + row * width + i, g / (one + exp(zero - g)) * up, n);
      }
    }
  });
}

}  // namespace trnc
