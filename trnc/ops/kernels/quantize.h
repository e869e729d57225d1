// Activations as grouped integer kernels read them: 12-bit integers in two signed digits, 16 * high + low, with one
// scale for each row and span of groups.
//
// One digit of 8 bits would be faster where the work is bound by arithmetic, but its error is what the answers
// of a small model turn on: a few large channels cost the others of their span their digits. Steps 16 times
// finer take that away, and because 16 times a 4-bit weight still is a byte, a matrix unit multiplies both
// digits in one go.
//
// Rows come in blocks of kBlockRows, the last one short. A block is one record for each group, and a record
// the digits of its rows, 32 high bytes and 32 low bytes each, then their sums.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace trnc {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kDigitBytes = 2 * kGroup;
constexpr int64_t kRowBytes = kDigitBytes + 4;  // of one row in a record
constexpr int64_t kSpanGroups = 6;              // groups that share a scale; the last span of a row may be short
constexpr float kLargest = 127.0f * 16.0f;      // so that the high digit fits an int8 after rounding

template <class T>
T read_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void write_as(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// One group of a block with room for `rows` rows.
template <class Byte>
struct Record {
  Byte* at;
  int64_t rows;
  Byte* high(int64_t row) const { return at + row * kDigitBytes; }
  Byte* low(int64_t row) const { return high(row) + kGroup; }
  Byte* correction(int64_t row) const { return at + rows * kDigitBytes + row * 4; }
  Record skip(int64_t groups) const { return {at + groups * rows * kRowBytes, rows}; }
  Record next() const { return skip(1); }
};

// The largest magnitude of n values, found among bit patterns, which order like magnitudes and put NaN on top.
inline float largest_magnitude(const float* x, int64_t n) {
  I32x16 top = broadcast(0);
  for (int64_t i = 0; i < n; i += kLanes) top = max(top, as_int(load(x + i)) & broadcast(0x7fffffff));
  const int32_t bits = reduce_max(top);
  return read_as<float>(reinterpret_cast<const uint8_t*>(&bits));
}

// Quantises 32 values, each times `inverse`. The correction is the sum of the integers, as a float where kBias is 0, else
// times -kBias as an integer.
template <int kBias>
void quantize_group(const float* x, F32x16 inverse, Record<uint8_t> record, int64_t row) {
  I32x16 total = broadcast(0);
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const I32x16 q = to_int(load(x + i) * inverse);
    const I32x16 high = shift_right<4>(q + broadcast(8));
    store_i8(reinterpret_cast<int8_t*>(record.high(row)) + i, high);
    store_i8(reinterpret_cast<int8_t*>(record.low(row)) + i, q - shift_left<4>(high));
    total = total + q;
  }
  const int32_t sum = reduce_add(total);
  if constexpr (kBias == 0) write_as(record.correction(row), static_cast<float>(sum));
  else write_as(record.correction(row), -kBias * sum);
}

// Quantises the groups of a span and returns its scale. One that holds a NaN or an infinity gets a scale that is none, and
// so do the outputs that it takes part in.
template <int kBias>
float quantize_span(const float* x, int64_t groups, Record<uint8_t> record, int64_t row) {
  const float amax = largest_magnitude(x, groups * kGroup);
  const F32x16 inverse = broadcast(amax > 1e-30f && amax < 1e38f ? kLargest / amax : 0.0f);
  for (int64_t group = 0; group < groups; ++group, record = record.next()) {
    quantize_group<kBias>(x + group * kGroup, inverse, record, row);
  }
  return amax / kLargest;
}

// Makes the rows beyond a block's last ones harmless where a kernel multiplies them: all zero.
inline void clear_row(Record<uint8_t> record, int64_t groups, int64_t row) {
  for (int64_t group = 0; group < groups; ++group, record = record.next()) {
    std::memset(record.high(row), 0, kDigitBytes);
    std::memset(record.correction(row), 0, 4);
  }
}

}  // namespace trnc
