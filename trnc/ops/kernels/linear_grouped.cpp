// Grouped integer weights times activations quantised here to int8, per row and group of 32.
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
constexpr int64_t kRowBytes = kGroup + 8;     // of one row's group: 32 int8, the scale, the correction

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

// Quantises 32 values. The largest magnitude is found among bit patterns, which order like magnitudes
// and put NaN on top: a group that holds one gets the scale NaN, and so do the outputs it takes part in.
template <class F>
void quantize_group(const float* x, int8_t* q, uint8_t* scale_at, uint8_t* correction_at) {
  const F32x16 lo = load(x), hi = load(x + kLanes);
  const I32x16 magnitude = broadcast(0x7fffffff);
  const int32_t top = max_lanes(max(as_int(lo) & magnitude, as_int(hi) & magnitude));
  const float amax = read_as<float>(reinterpret_cast<const uint8_t*>(&top));
  const float scale = amax / 127.0f;
  const F32x16 inverse = broadcast(amax > 1e-30f && amax < 1e38f ? 127.0f / amax : 0.0f);
  const I32x16 q_lo = to_int(lo * inverse), q_hi = to_int(hi * inverse);
  store_i8(q, q_lo);
  store_i8(q + kLanes, q_hi);
  const int32_t sum = sum_lanes(q_lo + q_hi);
  std::memcpy(scale_at, &scale, sizeof scale);
  if constexpr (F::kOffset) {
    const float correction = scale * static_cast<float>(sum);
    std::memcpy(correction_at, &correction, sizeof correction);
  } else {
    const int32_t correction = -F::kBias * sum;
    std::memcpy(correction_at, &correction, sizeof correction);
  }
}

// Quantises `rows` rows into one block: for each group all rows' int8, all scales, all corrections.
template <class F>
void quantize_block(const float* x, int64_t rows, int64_t width, uint8_t* block) {
  for (int64_t group = 0; group < width / kGroup; ++group) {
    uint8_t* record = block + group * rows * kRowBytes;
    for (int64_t row = 0; row < rows; ++row) {
      quantize_group<F>(x + row * width + group * kGroup,
                        reinterpret_cast<int8_t*>(record + row * kGroup), record + rows * kGroup + row * 4,
                        record + rows * (kGroup + 4) + row * 4);
    }
  }
}

// One tile times R rows: acc[r] = sum over groups.
template <class F, int R>
void multiply_tile(const uint8_t* w, const uint8_t* a, int64_t groups, F32x16* out) {
  F32x16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = broadcast(0.0f);
  for (int64_t group = 0; group < groups; ++group, w += record_bytes<F>(), a += R * kRowBytes) {
    const uint8_t* scales = a + R * kGroup;
    const uint8_t* corrections = scales + R * 4;
    I32x16 dot[R];
    for (int r = 0; r < R; ++r) {
      dot[r] = broadcast(F::kOffset ? 0 : read_as<int32_t>(corrections + r * 4));
    }
#pragma GCC unroll kUnroll
    for (int b = 0; b < F::kBlocks; ++b) {
      const Bytes64 block = load_bytes(w + b * 64);
      if constexpr (F::kNibbles) {
        const Bytes64 low = low_nibbles(block), high = high_nibbles(block);
#pragma GCC unroll kUnroll
        for (int r = 0; r < R; ++r) {
          dot[r] = dot_u4(dot[r], low, read_as<int32_t>(a + r * kGroup + b * 4));
          dot[r] = dot_u4(dot[r], high, read_as<int32_t>(a + r * kGroup + 16 + b * 4));
        }
      } else {
#pragma GCC unroll kUnroll
        for (int r = 0; r < R; ++r) {
          dot[r] = dot_u8(dot[r], block, read_as<int32_t>(a + r * kGroup + b * 4));
        }
      }
    }
    const auto* constants = reinterpret_cast<const uint16_t*>(w + F::kBlocks * 64);
    const F32x16 scale = load_f16(constants);
#pragma GCC unroll kUnroll
    for (int r = 0; r < R; ++r) {
      acc[r] = fma(to_float(dot[r]), scale * broadcast(read_as<float>(scales + r * 4)), acc[r]);
      if constexpr (F::kOffset) {
        const F32x16 correction = broadcast(read_as<float>(corrections + r * 4));
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
