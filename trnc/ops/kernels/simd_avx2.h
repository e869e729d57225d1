// simd.h on AVX2, FMA and F16C; with AVX-VNNI where the build has it.
#pragma once

#include <immintrin.h>

namespace trnc {

constexpr bool kWide = false;
constexpr int kUnroll = 8;

struct F32x16 { __m256 lo, hi; };
struct I32x16 { __m256i lo, hi; };
struct Bytes64 { __m256i lo, hi; };

namespace detail {
// All ones in lane i where bit i of the mask is set.
inline __m256i lanes_of(int mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits);
}
inline __m256i low_lanes(int n) { return lanes_of(first_lanes(n) & 0xff); }
inline __m256i high_lanes(int n) { return lanes_of(first_lanes(n) >> 8); }
inline Mask mask_of(__m256 lo, __m256 hi) {
  return static_cast<Mask>(_mm256_movemask_ps(lo) | _mm256_movemask_ps(hi) << 8);
}
inline __m256 widen_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m256 widen_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
}  // namespace detail

inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I32x16 broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline I32x16 load(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline F32x16 load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, detail::low_lanes(n)), _mm256_maskload_ps(p + 8, detail::high_lanes(n))};
}
inline void store(float* p, F32x16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline void stream(float* p, F32x16 a) { _mm256_stream_ps(p, a.lo), _mm256_stream_ps(p + 8, a.hi); }
inline void stream_fence() { _mm_sfence(); }
inline void store(int32_t* p, I32x16 a) {
  _mm256_storeu_si256((__m256i*)p, a.lo), _mm256_storeu_si256((__m256i*)(p + 8), a.hi);
}
inline void store_n(float* p, F32x16 a, int n) {
  _mm256_maskstore_ps(p, detail::low_lanes(n), a.lo);
  _mm256_maskstore_ps(p + 8, detail::high_lanes(n), a.hi);
}
inline F32x16 load_f16(const uint16_t* p) { return {detail::widen_f16(p), detail::widen_f16(p + 8)}; }
inline F32x16 load_bf16(const uint16_t* p) { return {detail::widen_bf16(p), detail::widen_bf16(p + 8)}; }

inline F32x16 load_i8(const int8_t* p) {
  const __m128i low = _mm_loadl_epi64((const __m128i*)p), high = _mm_loadl_epi64((const __m128i*)(p + 8));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))};
}

inline float first_lane(F32x16 a) { return _mm256_cvtss_f32(a.lo); }

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Mask less(F32x16 a, F32x16 b) {
  return detail::mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ));
}
inline Mask equal(F32x16 a, F32x16 b) {
  return detail::mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
inline F32x16 select(Mask m, F32x16 a, F32x16 b) {
  const __m256 lo = _mm256_castsi256_ps(detail::lanes_of(m & 0xff));
  const __m256 hi = _mm256_castsi256_ps(detail::lanes_of(m >> 8));
  return {_mm256_blendv_ps(b.lo, a.lo, lo), _mm256_blendv_ps(b.hi, a.hi, hi)};
}

inline float reduce_add(F32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

namespace detail {
template <class Op>
int32_t reduce(I32x16 a, Op op) {
  const __m256i eight = op(a.lo, a.hi);
  const __m256i four = op(eight, _mm256_permute2x128_si256(eight, eight, 1));
  const __m256i two = op(four, _mm256_shuffle_epi32(four, 0x4e));
  return _mm256_cvtsi256_si32(op(two, _mm256_shuffle_epi32(two, 0xb1)));
}
}  // namespace detail
inline int32_t reduce_add(I32x16 a) {
  return detail::reduce(a, [](__m256i x, __m256i y) { return _mm256_add_epi32(x, y); });
}
inline int32_t reduce_max(I32x16 a) {
  return detail::reduce(a, [](__m256i x, __m256i y) { return _mm256_max_epi32(x, y); });
}

inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline I32x16 max(I32x16 a, I32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
template <int n> I32x16 shift_left(I32x16 a) { return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
template <int n> I32x16 shift_right(I32x16 a) { return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)}; }
inline F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 to_int(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F32x16 as_float(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline I32x16 as_int(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline void store_i8(int8_t* p, I32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline Bytes64 load_bytes(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Bytes64 low_nibbles(Bytes64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Bytes64 high_nibbles(Bytes64 a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}

namespace detail {
#if defined(__AVXVNNI__)
inline __m256i madd4(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
inline __m256i madd4_wide(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
#else
// u * s summed over four bytes. maddubs saturates at 16 bits: the caller keeps pairs below that.
inline __m256i madd4(__m256i acc, __m256i u, __m256i s) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
// Any bytes u and s: even and odd ones widened to 16 bits, so that nothing saturates.
inline __m256i madd4_wide(__m256i acc, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
#endif
}  // namespace detail
inline I32x16 dot_u4(I32x16 acc, Bytes64 w, int32_t a) {
  const __m256i four = _mm256_set1_epi32(a);
  return {detail::madd4(acc.lo, w.lo, four), detail::madd4(acc.hi, w.hi, four)};
}
constexpr int kInt8Bias = 128;
inline I32x16 dot_u8(I32x16 acc, Bytes64 w, int32_t a) {
  const __m256i four = _mm256_set1_epi32(a);
  return {detail::madd4_wide(acc.lo, w.lo, four), detail::madd4_wide(acc.hi, w.hi, four)};
}
inline Bytes64 biased(Bytes64 b) {
  const __m256i signs = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(b.lo, signs), _mm256_xor_si256(b.hi, signs)};
}
inline I32x16 dot_i8(I32x16 acc, Bytes64 w, int32_t a) {
  const __m256i four = _mm256_set1_epi32(a);
  return {detail::madd4_wide(acc.lo, four, w.lo), detail::madd4_wide(acc.hi, four, w.hi)};
}

}  // namespace trnc
