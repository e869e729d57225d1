// Activations as grouped integer kernels read them: per row and group of 32, 12-bit integers in two signed
// digits, 16 * high + low, with one scale.
//
// One digit of 8 bits would be faster where the work is bound by arithmetic, but its error is what the answers
// of a small model turn on: a few large channels cost the others of their group their digits. Steps 16 times
// finer take that away, and because 16 times a 4-bit weight still is a byte, a matrix unit multiplies both
// digits in one go.
//
// Rows come in blocks of kBlockRows, the last one short. A block is one record for each group, and a record
// the digits of its rows, 32 high bytes and 32 low bytes each, then their scales, then their corrections
// for the offset or the bias of the weights' format.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace trnc {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kDigitBytes = 2 * kGroup;
constexpr int64_t kRowBytes = kDigitBytes + 8;  // of one row in a record
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
  Byte* scale(int64_t row) const { return at + rows * kDigitBytes + row * 4; }
  Byte* correction(int64_t row) const { return scale(rows) + row * 4; }
  Record skip(int64_t groups) const { return {at + groups * rows * kRowBytes, rows}; }
  Record next() const { return skip(1); }
};

// Quantises 32 values. The largest magnitude is found among bit patterns, which order like magnitudes
// and put NaN on top: a group that holds one gets the scale NaN, and so do the outputs it takes part in.
// The correction is scale * sum where kBias is 0, else the integer -kBias * sum.
template <int kBias>
void quantize_group(const float* x, Record<uint8_t> record, int64_t row) {
  const F32x16 part[2] = {load(x), load(x + kLanes)};
  const I32x16 magnitude = broadcast(0x7fffffff);
  const int32_t top = reduce_max(max(as_int(part[0]) & magnitude, as_int(part[1]) & magnitude));
  const float amax = read_as<float>(reinterpret_cast<const uint8_t*>(&top));
  const float scale = amax / kLargest;
  const F32x16 inverse = broadcast(amax > 1e-30f && amax < 1e38f ? kLargest / amax : 0.0f);
  I32x16 total = broadcast(0);
  for (int i = 0; i < 2; ++i) {
    const I32x16 q = to_int(part[i] * inverse);
    const I32x16 high = shift_right<4>(q + broadcast(8));
    store_i8(reinterpret_cast<int8_t*>(record.high(row)) + i * kLanes, high);
    store_i8(reinterpret_cast<int8_t*>(record.low(row)) + i * kLanes, q - shift_left<4>(high));
    total = total + q;
  }
  const int32_t sum = reduce_add(total);
  write_as(record.scale(row), scale);
  if constexpr (kBias == 0) {
    write_as(record.correction(row), scale * static_cast<float>(sum));
  } else {
    write_as(record.correction(row), -kBias * sum);
  }
}

// Makes the rows beyond a block's last ones harmless where a kernel multiplies them: all zero.
inline void clear_row(Record<uint8_t> record, int64_t row) {
  std::memset(record.high(row), 0, kDigitBytes);
  std::memset(record.scale(row), 0, 4);
  std::memset(record.correction(row), 0, 4);
}

}  // namespace trnc
