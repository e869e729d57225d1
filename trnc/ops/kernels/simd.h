// Sixteen lanes of f32 or int32 with one meaning on every instruction set, so that a kernel is written
// once. The compile flags choose the implementation; only the plain build's fma rounds twice.
//
//   F32x16, I32x16      load, store, broadcast, + - * /, max, min (b where either is NaN), fma(a, b, c)
//   load_n, store_n     the first n lanes only (0 <= n; 16 or more is all); the rest load as zero
//   load_f16, load_bf16, load_i8  16 of these, widened
//   Mask                bit i stands for lane i: less, equal, select(mask, where set, elsewhere)
//   to_int              to the nearest, ties to even, for |x| < 2^22; to_float
//   first_lane          lane 0
//   kWide, kUnroll      whether a vector is one register; how far to unroll loops over registers
//   Bytes64             16 lanes of 4 bytes. dot_u4(acc, w, a) adds to each lane the products of its
//                       four bytes of w, each in 0..15, with the four signed bytes of a (-128..127).
//                       dot_u8 does so for w in 0..255 that stand for w - 128, where an accumulator must
//                       start at -kInt8Bias * (sum of all a); biased(b) is b + 128 of signed bytes b.
//                       dot_i8 does so for w in -128..127 and a in 0..255.
//   reduce_add, reduce_max  of all lanes; of f32 in pairs eight, four, two and one apart
//   stream, stream_fence  a store past the caches, to 64 aligned bytes; makes such stores visible to other threads
//   prefetch            below
//   exp, log            below, in the same operations on every build
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace trnc {

constexpr int kLanes = 16;

using Mask = uint16_t;

inline Mask first_lanes(int n) { return n >= kLanes ? Mask(0xffff) : Mask((1u << n) - 1); }

// Asks the second cache for the lines of `bytes` from `p` on, which need not exist: it can wait for more lines at once
// than the first. Inlined by force: gcc takes a function that only prefetches for one without effect.
[[gnu::always_inline]] inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

}  // namespace trnc

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace trnc {

// 2^n for -126 <= n <= 127.
inline F32x16 power_of_two(I32x16 n) { return as_float(shift_left<23>(n + broadcast(127))); }

// e^x within 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor-like polynomial for e^r (coefficients
// of Cephes expf), scaled in two halves so that results may be subnormal. exp(-inf) is 0, exp(inf) inf.
inline F32x16 exp(F32x16 x) {
  const F32x16 bounded = min(broadcast(89.0f), max(broadcast(-104.0f), x));
  const I32x16 n = to_int(bounded * broadcast(1.44269504088896341f));
  const F32x16 fn = to_float(n);
  F32x16 r = fma(fn, broadcast(-0.693359375f), bounded);
  r = fma(fn, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  const I32x16 half = shift_right<1>(n);
  const F32x16 result = p * power_of_two(half) * power_of_two(n - half);
  return select(less(x, broadcast(-104.0f)), broadcast(0.0f), result);
}

// ln x within 2 ulp (Cephes logf): x = m 2^e with m in [sqrt 1/2, sqrt 2). log(0) is -inf, log(x < 0) NaN.
inline F32x16 log(F32x16 x) {
  const Mask tiny = less(x, broadcast(0x1p-126f));
  const F32x16 scaled = select(tiny, x * broadcast(0x1p23f), x);
  const I32x16 bits = as_int(scaled);
  const I32x16 raised = bits - broadcast(0x3f3504f3);  // the bits of sqrt 1/2: floors e the right way
  const F32x16 bias = select(tiny, broadcast(-23.0f), broadcast(0.0f));
  const F32x16 e = to_float(shift_right<23>(raised)) + bias;
  const F32x16 m = as_float((raised & broadcast(0x007fffff)) + broadcast(0x3f3504f3)) - broadcast(1.0f);
  const F32x16 z = m * m;
  F32x16 p = broadcast(7.0376836292e-2f);
  p = fma(p, m, broadcast(-1.1514610310e-1f));
  p = fma(p, m, broadcast(1.1676998740e-1f));
  p = fma(p, m, broadcast(-1.2420140846e-1f));
  p = fma(p, m, broadcast(1.4249322787e-1f));
  p = fma(p, m, broadcast(-1.6668057665e-1f));
  p = fma(p, m, broadcast(2.0000714765e-1f));
  p = fma(p, m, broadcast(-2.4999993993e-1f));
  p = fma(p, m, broadcast(3.3333331174e-1f));
  F32x16 y = fma(e, broadcast(-2.12194440e-4f), p * m * z);
  y = fma(z, broadcast(-0.5f), y);
  const F32x16 inf = broadcast(std::numeric_limits<float>::infinity());
  const F32x16 nan = broadcast(std::numeric_limits<float>::quiet_NaN());
  F32x16 result = fma(e, broadcast(0.693359375f), m + y);
  result = select(equal(x, inf), inf, result);
  result = select(equal(x, broadcast(0.0f)), broadcast(0.0f) - inf, result);
  return select(less(x, broadcast(0.0f)), nan, select(Mask(~equal(x, x)), x, result));
}

}  // namespace trnc
