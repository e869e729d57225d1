// Grouped integer weights times activations quantised here to int16, per row and group of 32.
//
// int8 would be faster where the work is bound by arithmetic, but its error is what the answers of a small
// model turn on: a few large channels cost the others of their group their digits. An int16 is two int8
// digits, 256 * high + low, so the integer dot products of bytes serve for both, and the weights, which
// bound the work for few rows, are read once.
//
// One output adds up, group after group, acc = fma(float(dot), scale_w * scale_a, acc), where dot is the
// exact integer sum of the group, and for formats with offsets acc = fma(offset_w, scale_a * sum(a), acc).
// Formats that store q + bias start the integer sum at -bias * sum(a) instead. Nothing of this depends on
// how rows are blocked.
#include <cmath>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "tiles.h"

namespace trnc {
namespace {

constexpr int kRows = kWide ? 8 : 4;          // rows that share one unpacking of the weights
constexpr int64_t kChunkBytes = 128 * 1024;   // quantised rows that stay in L2 while tiles stream
constexpr int64_t kSpanProducts = 1 << 17;    // multiplications that are worth claiming a span for
constexpr float kLargest = 127.0f * 256.0f;   // so that the high digit fits an int8 after rounding

// A record holds one group of a block of rows: all rows' high digits, then the low ones, the scales, and the
// corrections for the format's offset or bias.
constexpr int64_t kRowBytes = 2 * kGroup + 8;

template <class Byte>
struct Record {
  Byte* at;
  int64_t rows;
  Byte* high(int64_t row) const { return at + row * kGroup; }
  Byte* low(int64_t row) const { return at + (rows + row) * kGroup; }
  Byte* scale(int64_t row) const { return at + 2 * rows * kGroup + row * 4; }
  Byte* correction(int64_t row) const { return at + rows * (2 * kGroup + 4) + row * 4; }
};

struct Int8 {
  static constexpr int kBlocks = 8, kBias = kInt8Bias;
  static constexpr bool kOffset = false, kNibbles = false;
};
struct Int4 {
  static constexpr int kBlocks = 4, kBias = 0;
  static constexpr bool kOffset = true, kNibbles = true;
};
struct Int4Symmetric {
  static constexpr int kBlocks = 4, kBias = 8;
  static constexpr bool kOffset = false, kNibbles = true;
};

template <class F>
constexpr int64_t record_bytes() { return F::kBlocks * 64 + (F::kOffset ? 64 : 32); }

template <class T>
T read_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

int32_t sum_lanes(I32x16 a) {
  int32_t lane[kLanes], total = 0;
  store(lane, a);
  for (int32_t value : lane) total += value;
  return total;
}

int32_t max_lanes(I32x16 a) {
  int32_t lane[kLanes], largest = 0;
  store(lane, a);
  for (int32_t value : lane) largest = std::max(largest, value);
  return largest;
}

template <class T>
void write_as(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// Stores 16 int16 as two digits.
void store_digits(uint8_t* high, uint8_t* low, I32x16 q) {
  const I32x16 rounded = shift_right<8>(q + broadcast(128));
  store_i8(reinterpret_cast<int8_t*>(high), rounded);
  store_i8(reinterpret_cast<int8_t*>(low), q - shift_left<8>(rounded));
}

// Quantises 32 values. The largest magnitude is found among bit patterns, which order like magnitudes
// and put NaN on top: a group that holds one gets the scale NaN, and so do the outputs it takes part in.
template <class F>
void quantize_group(const float* x, Record<uint8_t> record, int64_t row) {
  const F32x16 first = load(x), second = load(x + kLanes);
  const I32x16 magnitude = broadcast(0x7fffffff);
  const int32_t top = max_lanes(max(as_int(first) & magnitude, as_int(second) & magnitude));
  const float amax = read_as<float>(reinterpret_cast<const uint8_t*>(&top));
  const float scale = amax / kLargest;
  const F32x16 inverse = broadcast(amax > 1e-30f && amax < 1e38f ? kLargest / amax : 0.0f);
  const I32x16 q_first = to_int(first * inverse), q_second = to_int(second * inverse);
  store_digits(record.high(row), record.low(row), q_first);
  store_digits(record.high(row) + kLanes, record.low(row) + kLanes, q_second);
  const int32_t sum = sum_lanes(q_first + q_second);
  write_as(record.scale(row), scale);
  if constexpr (F::kOffset) {
    write_as(record.correction(row), scale * static_cast<float>(sum));
  } else {
    write_as(record.correction(row), -F::kBias * sum);
  }
}

// Quantises `rows` rows into one block of records.
template <class F>
void quantize_block(const float* x, int64_t rows, int64_t width, uint8_t* block) {
  for (int64_t group = 0; group < width / kGroup; ++group) {
    const Record<uint8_t> record{block + group * rows * kRowBytes, rows};
    for (int64_t row = 0; row < rows; ++row) quantize_group<F>(x + row * width + group * kGroup, record, row);
  }
}

// The dot products of R rows' digits with one group of a tile, high and low digits apart.
template <class F, int R>
inline void multiply_group(const uint8_t* w, Record<const uint8_t> record, I32x16 (&high)[R], I32x16 (&low)[R]) {
#pragma GCC unroll kUnroll
  for (int b = 0; b < F::kBlocks; ++b) {
    const Bytes64 block = load_bytes(w + b * 64);
    if constexpr (F::kNibbles) {
      const Bytes64 even = low_nibbles(block), odd = high_nibbles(block);
#pragma GCC unroll kUnroll
      for (int r = 0; r < R; ++r) {
        high[r] = dot_u4(high[r], even, read_as<int32_t>(record.high(r) + b * 4));
        low[r] = dot_u4(low[r], even, read_as<int32_t>(record.low(r) + b * 4));
        high[r] = dot_u4(high[r], odd, read_as<int32_t>(record.high(r) + 16 + b * 4));
        low[r] = dot_u4(low[r], odd, read_as<int32_t>(record.low(r) + 16 + b * 4));
      }
    } else {
#pragma GCC unroll kUnroll
      for (int r = 0; r < R; ++r) {
        high[r] = dot_u8(high[r], block, read_as<int32_t>(record.high(r) + b * 4));
        low[r] = dot_u8(low[r], block, read_as<int32_t>(record.low(r) + b * 4));
      }
    }
  }
}

// One tile times R rows: acc[r] = sum over groups.
template <class F, int R>
void multiply_tile(const uint8_t* w, const uint8_t* a, int64_t groups, F32x16* out) {
  F32x16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = broadcast(0.0f);
  for (int64_t group = 0; group < groups; ++group, w += record_bytes<F>(), a += R * kRowBytes) {
    const Record<const uint8_t> record{a, R};
    I32x16 high[R], low[R];
    for (int r = 0; r < R; ++r) {
      high[r] = broadcast(0);
      low[r] = broadcast(F::kOffset ? 0 : read_as<int32_t>(record.correction(r)));
    }
    multiply_group<F, R>(w, record, high, low);
    const auto* constants = reinterpret_cast<const uint16_t*>(w + F::kBlocks * 64);
    const F32x16 scale = load_f16(constants);
#pragma GCC unroll kUnroll
    for (int r = 0; r < R; ++r) {
      const F32x16 dot = to_float(shift_left<8>(high[r]) + low[r]);
      acc[r] = fma(dot, scale * broadcast(read_as<float>(record.scale(r))), acc[r]);
      if constexpr (F::kOffset) {
        const F32x16 correction = broadcast(read_as<float>(record.correction(r)));
        acc[r] = fma(load_f16(constants + kLanes), correction, acc[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

// Rows begin..end-1 (begin a multiple of kRows) of one tile.
template <class F>
void multiply_rows(const Linear& op, const uint8_t* quantized, int64_t tile, int64_t begin, int64_t end) {
  const int64_t groups = op.in_features / kGroup;
  const uint8_t* w = op.weight + tile * groups * record_bytes<F>();
  for (int64_t row = begin; row < end; row += kRows) {
    with_rows<kRows>(end - row, [&](auto rows) {
      F32x16 acc[rows];
      multiply_tile<F, rows>(w, quantized + row * groups * kRowBytes, groups, acc);
      for (int r = 0; r < rows; ++r) finish(op, row + r, tile, acc[r]);
    });
  }
}

template <class F>
void run(const Linear& op) {
  static thread_local std::vector<uint8_t> scratch;
  const int64_t row_bytes = op.in_features / kGroup * kRowBytes;
  scratch.resize(op.rows * row_bytes);
  uint8_t* const quantized = scratch.data();
  const int64_t blocks = (op.rows + kRows - 1) / kRows;
  parallel_for(blocks, std::max<int64_t>(1, kSpanProducts / 4 / (kRows * op.in_features)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin * kRows; row < std::min(op.rows, end * kRows); row += kRows) {
                   quantize_block<F>(op.x + row * op.in_features, std::min<int64_t>(kRows, op.rows - row),
                                     op.in_features, quantized + row * row_bytes);
                 }
               });
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / (kRows * row_bytes)) * kRows;
  const int64_t chunks = (op.rows + chunk - 1) / chunk, tiles = op.tiles();
  const int64_t products = op.in_features * kTileWidth * std::min(chunk, op.rows);
  parallel_for(tiles * chunks, std::max<int64_t>(1, kSpanProducts / products),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = i / tiles * chunk;
                   multiply_rows<F>(op, quantized, i % tiles, row, std::min(op.rows, row + chunk));
                 }
               });
}

}  // namespace

void linear_grouped(const Linear& op, Format format) {
  if (op.rows == 0) return;
  switch (format) {
    case Format::i8g32: return run<Int8>(op);
    case Format::i4g32: return run<Int4>(op);
    default: return run<Int4Symmetric>(op);
  }
}

}  // namespace trnc
