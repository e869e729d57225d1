// simd.h in plain C++ with the compiler's vector types: any machine, little-endian.
#pragma once

namespace trnc {

constexpr bool kWide = false;
constexpr int kUnroll = 1;  // unrolled, these take the compiler half a minute

namespace detail {
using FloatVector = float __attribute__((vector_size(64)));
using IntVector = int32_t __attribute__((vector_size(64)));
using UintVector = uint32_t __attribute__((vector_size(64)));
inline Mask mask_of(IntVector lanes) {
  Mask mask = 0;
  for (int i = 0; i < kLanes; ++i) mask = static_cast<Mask>(mask | (lanes[i] != 0) << i);
  return mask;
}
}  // namespace detail

struct F32x16 { detail::FloatVector v; };
struct I32x16 { detail::IntVector v; };
struct Bytes64 { detail::UintVector v; };

inline F32x16 broadcast(float x) { return {detail::FloatVector{} + x}; }
inline I32x16 broadcast(int32_t x) { return {detail::IntVector{} + x}; }
inline F32x16 load_n(const float* p, int n) {
  F32x16 a{};
  std::memcpy(&a, p, sizeof(float) * (n < kLanes ? n : kLanes));
  return a;
}
inline F32x16 load(const float* p) { return load_n(p, kLanes); }
inline I32x16 load(const int32_t* p) {
  I32x16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline void store_n(float* p, F32x16 a, int n) { std::memcpy(p, &a, sizeof(float) * (n < kLanes ? n : kLanes)); }
inline void store(float* p, F32x16 a) { std::memcpy(p, &a, sizeof a); }
inline void stream(float* p, F32x16 a) { store(p, a); }
inline void stream_fence() {}
inline void store(int32_t* p, I32x16 a) { std::memcpy(p, &a, sizeof a); }

inline float first_lane(F32x16 a) { return a.v[0]; }

inline F32x16 operator+(F32x16 a, F32x16 b) { return {a.v + b.v}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {a.v - b.v}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {a.v * b.v}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {a.v / b.v}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {a.v * b.v + c.v}; }  // rounds twice
inline F32x16 max(F32x16 a, F32x16 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {a.v < b.v ? a.v : b.v}; }
inline Mask less(F32x16 a, F32x16 b) { return detail::mask_of(a.v < b.v); }
inline Mask equal(F32x16 a, F32x16 b) { return detail::mask_of(a.v == b.v); }
inline F32x16 select(Mask m, F32x16 a, F32x16 b) {
  for (int i = 0; i < kLanes; ++i) b.v[i] = m >> i & 1 ? a.v[i] : b.v[i];
  return b;
}

inline float reduce_add(F32x16 a) {
  float lane[kLanes];
  store(lane, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

inline float reduce_max(F32x16 a) {
  float lane[kLanes];
  store(lane, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}

inline int32_t reduce_add(I32x16 a) {
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += a.v[i];
  return total;
}
inline int32_t reduce_max(I32x16 a) {
  int32_t largest = a.v[0];
  for (int i = 1; i < kLanes; ++i) largest = a.v[i] > largest ? a.v[i] : largest;
  return largest;
}

inline I32x16 operator+(I32x16 a, I32x16 b) { return {a.v + b.v}; }
inline I32x16 operator-(I32x16 a, I32x16 b) { return {a.v - b.v}; }
inline I32x16 operator&(I32x16 a, I32x16 b) { return {a.v & b.v}; }
inline I32x16 operator|(I32x16 a, I32x16 b) { return {a.v | b.v}; }
inline I32x16 max(I32x16 a, I32x16 b) { return {a.v > b.v ? a.v : b.v}; }
template <int n> I32x16 shift_left(I32x16 a) { return {detail::IntVector(detail::UintVector(a.v) << n)}; }
template <int n> I32x16 shift_right(I32x16 a) { return {a.v >> n}; }
inline F32x16 to_float(I32x16 a) { return {__builtin_convertvector(a.v, detail::FloatVector)}; }
inline F32x16 as_float(I32x16 a) { return {detail::FloatVector(a.v)}; }
inline I32x16 as_int(F32x16 a) { return {detail::IntVector(a.v)}; }
// Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa, for |a| < 2^22.
inline I32x16 to_int(F32x16 a) {
  const F32x16 magic = broadcast(12582912.0f);
  return as_int(a + magic) - as_int(magic);
}
inline void store_i8(int8_t* p, I32x16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

inline I32x16 load_u16(const uint16_t* p) {
  I32x16 a;
  for (int i = 0; i < kLanes; ++i) a.v[i] = p[i];
  return a;
}
inline F32x16 load_i8(const int8_t* p) {
  I32x16 a;
  for (int i = 0; i < kLanes; ++i) a.v[i] = p[i];
  return to_float(a);
}
inline F32x16 load_bf16(const uint16_t* p) { return as_float(shift_left<16>(load_u16(p))); }
// The bits of |x| moved to an f32's place are x * 2^-112, subnormals too; infinity and NaN keep all
// exponent bits.
inline F32x16 load_f16(const uint16_t* p) {
  const I32x16 half = load_u16(p);
  const I32x16 size = half & broadcast(0x7fff);
  const I32x16 sign = shift_left<16>(half & broadcast(0x8000));
  const F32x16 scaled = as_float(shift_left<13>(size)) * broadcast(0x1p112f);
  const I32x16 special{size.v >= 0x7c00 ? broadcast(0x7f800000).v : broadcast(0).v};
  return as_float(as_int(scaled) | special | sign);
}

inline Bytes64 load_bytes(const void* p) {
  Bytes64 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline Bytes64 low_nibbles(Bytes64 a) { return {a.v & 0x0f0f0f0fu}; }
inline Bytes64 high_nibbles(Bytes64 a) { return {a.v >> 4 & 0x0f0f0f0fu}; }
inline I32x16 dot_u4(I32x16 acc, Bytes64 w, int32_t a) {
  for (int i = 0; i < 32; i += 8) acc.v += detail::IntVector(w.v >> i & 255u) * static_cast<int8_t>(a >> i);
  return acc;
}
constexpr int kInt8Bias = 128;
inline I32x16 dot_u8(I32x16 acc, Bytes64 w, int32_t a) { return dot_u4(acc, w, a); }
inline Bytes64 biased(Bytes64 b) { return {b.v ^ 0x80808080u}; }
inline I32x16 dot_i8(I32x16 acc, Bytes64 w, int32_t a) {
  for (int i = 0; i < 32; i += 8) {
    acc.v += (detail::IntVector(w.v << (24 - i)) >> 24) * static_cast<int32_t>(static_cast<uint8_t>(a >> i));
  }
  return acc;
}

}  // namespace trnc
