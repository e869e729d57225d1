// simd.h on AVX512 (F, BW, DQ, VL) with VNNI.
#pragma once

#include <immintrin.h>

namespace trnc {

constexpr bool kWide = true;
constexpr int kUnroll = 8;

struct F32x16 { __m512 v; };
struct I32x16 { __m512i v; };
struct Bytes64 { __m512i v; };

inline F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline I32x16 broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline I32x16 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline F32x16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void stream(float* p, F32x16 a) { _mm512_stream_ps(p, a.v); }
inline void stream_fence() { _mm_sfence(); }
inline void store(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline void store_n(float* p, F32x16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline F32x16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

inline float first_lane(F32x16 a) { return _mm512_cvtss_f32(a.v); }

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Mask less(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline Mask equal(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline F32x16 select(Mask m, F32x16 a, F32x16 b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }

inline float reduce_add(F32x16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32x16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline int32_t reduce_add(I32x16 a) { return _mm512_reduce_add_epi32(a.v); }
inline int32_t reduce_max(I32x16 a) { return _mm512_reduce_max_epi32(a.v); }

inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I32x16 max(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int n> I32x16 shift_left(I32x16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> I32x16 shift_right(I32x16 a) { return {_mm512_srai_epi32(a.v, n)}; }
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32x16 to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 as_float(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I32x16 as_int(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
inline void store_i8(int8_t* p, I32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}

inline Bytes64 load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes64 low_nibbles(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes64 high_nibbles(Bytes64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
inline I32x16 dot_u4(I32x16 acc, Bytes64 w, int32_t a) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a))};
}
constexpr int kInt8Bias = 128;
inline I32x16 dot_u8(I32x16 acc, Bytes64 w, int32_t a) { return dot_u4(acc, w, a); }
inline Bytes64 biased(Bytes64 b) { return {_mm512_xor_si512(b.v, _mm512_set1_epi8(-128))}; }
inline I32x16 dot_i8(I32x16 acc, Bytes64 w, int32_t a) {
  return {_mm512_dpbusd_epi32(acc.v, _mm512_set1_epi32(a), w.v)};
}

}  // namespace trnc
