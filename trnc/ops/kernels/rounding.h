// Rounding some f32 to integers over their largest magnitude.
#pragma once

#include <cstring>

#include "simd.h"

namespace trnc {

// The largest magnitude of n values, found among bit patterns, which order like magnitudes and put NaN on top.
inline float largest_magnitude(const float* x, int64_t n) {
  const I32x16 magnitude = broadcast(0x7fffffff);
  I32x16 top = broadcast(0);
  for (int64_t i = 0; i < n; i += kLanes) top = max(top, as_int(load_n(x + i, static_cast<int>(n - i))) & magnitude);
  const int32_t bits = reduce_max(top);
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  return largest;
}

// An integer stands for itself times `scale`; a value times `inverse` is rounded to it.
struct Rounding {
  float scale, inverse;
};

// For integers up to `limit`. Values without a number to scale by become zeros, and NaN or infinity shows in the scale.
inline Rounding rounding_of(float largest, float limit) {
  return {largest / limit, largest > 1e-30f && largest < 1e38f ? limit / largest : 0.0f};
}

}  // namespace trnc
