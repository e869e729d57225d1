// Grouped integer weights times quantised activations (quantize.h).
//
// One output adds up, group after group, acc = fma(float(dot), scale_w * scale_a, acc), where dot is the
// exact integer sum of the group, and for formats with offsets acc = fma(offset_w, scale_a * sum(a), acc).
// Formats that store q + bias start the integer sum at -bias * sum(a) instead. Nothing of this depends on
// how rows are blocked, nor on whether vectors or the matrix unit made the integer sum.
#include <memory>
#include <vector>

#include "matrix_unit.h"
#include "parallel.h"
#include "quantize.h"
#include "tiles.h"

namespace trnc {
namespace {

constexpr int kRows = kWide ? 8 : 4;         // rows of a vector kernel that share one unpacking of the weights
constexpr int64_t kVectorRows = 12;          // so few rows do not repay what the matrix unit needs unpacked
constexpr int64_t kChunkBytes = 256 * 1024;  // quantised rows that stay in L2 while tiles stream
constexpr int64_t kPanelGroups = 9;          // groups whose unpacked weights stay in L1 while rows stream
constexpr int64_t kSpanElements = 2048;      // elements that are worth claiming a span for, to quantise
constexpr int64_t kSpanProducts = 1 << 17;   // multiplications that are worth claiming a span for
constexpr int64_t kPrefetchBytes = 4096;     // weights asked for ahead of their use; hardware looks less far

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

// The activations of one product. All blocks but the last hold kBlockRows; it has room for `last`.
struct Rows {
  uint8_t* at;
  int64_t count, groups, last;

  int64_t places() const { return (blocks() - 1) * kBlockRows + last; }
  int64_t blocks() const { return (count + kBlockRows - 1) / kBlockRows; }
  int64_t room(int64_t block) const { return block + 1 < blocks() ? kBlockRows : last; }
  Record<uint8_t> record(int64_t block) const {
    return {at + block * kBlockRows * groups * kRowBytes, room(block)};
  }
  Record<const uint8_t> read(int64_t block) const { return {record(block).at, room(block)}; }
};

// Quantises row `row`, or fills its place with zeros where it is past the last one.
template <class F>
void quantize_row(const Linear& op, const Rows& rows, int64_t row) {
  static thread_local std::vector<float> scratch;
  scratch.resize(op.in_features);
  const float* x = row < rows.count ? prepare_row(op, row, scratch.data()) : nullptr;
  Record<uint8_t> record = rows.record(row / kBlockRows);
  for (int64_t group = 0; group < rows.groups; ++group, record = record.next()) {
    if (x) quantize_group<F::kBias>(x + group * kGroup, record, row % kBlockRows);
    else clear_row(record, row % kBlockRows);
  }
}

// acc += the products of one group of a tile, from their integer sum; `correction` is not in `dot` yet.
template <class F>
inline F32x16 add_group(F32x16 acc, I32x16 dot, F32x16 scale, const uint16_t* constants, Record<const uint8_t> record,
                        int64_t row) {
  acc = fma(to_float(dot), scale * broadcast(read_as<float>(record.scale(row))), acc);
  if constexpr (F::kOffset) {
    acc = fma(load_f16(constants + kLanes), broadcast(read_as<float>(record.correction(row))), acc);
  }
  return acc;
}

// The vector kernel.

// The dot products of R rows' digits with one group of a tile, high and low digits apart.
template <class F, int R>
inline void multiply_group(const uint8_t* w, Record<const uint8_t> record, int64_t row, I32x16 (&high)[R],
                           I32x16 (&low)[R]) {
#pragma GCC unroll kUnroll
  for (int b = 0; b < F::kBlocks; ++b) {
    const Bytes64 block = load_bytes(w + b * 64);
    if constexpr (F::kNibbles) {
      const Bytes64 even = low_nibbles(block), odd = high_nibbles(block);
#pragma GCC unroll kUnroll
      for (int r = 0; r < R; ++r) {
        high[r] = dot_u4(high[r], even, read_as<int32_t>(record.high(row + r) + b * 4));
        low[r] = dot_u4(low[r], even, read_as<int32_t>(record.low(row + r) + b * 4));
        high[r] = dot_u4(high[r], odd, read_as<int32_t>(record.high(row + r) + 16 + b * 4));
        low[r] = dot_u4(low[r], odd, read_as<int32_t>(record.low(row + r) + 16 + b * 4));
      }
    } else {
#pragma GCC unroll kUnroll
      for (int r = 0; r < R; ++r) {
        high[r] = dot_u8(high[r], block, read_as<int32_t>(record.high(row + r) + b * 4));
        low[r] = dot_u8(low[r], block, read_as<int32_t>(record.low(row + r) + b * 4));
      }
    }
  }
}

// One tile times the R rows from `row` on of a block: acc[r] = sum over groups.
template <class F, int R>
void multiply_tile(const uint8_t* w, Record<const uint8_t> record, int64_t row, int64_t groups, F32x16* out) {
  F32x16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = broadcast(0.0f);
  for (int64_t group = 0; group < groups; ++group, w += record_bytes<F>(), record = record.next()) {
    prefetch(w + kPrefetchBytes, record_bytes<F>());
    I32x16 high[R], low[R];
    for (int r = 0; r < R; ++r) {
      high[r] = broadcast(0);
      low[r] = broadcast(F::kOffset ? 0 : read_as<int32_t>(record.correction(row + r)));
    }
    multiply_group<F, R>(w, record, row, high, low);
    const auto* constants = reinterpret_cast<const uint16_t*>(w + F::kBlocks * 64);
    const F32x16 scale = load_f16(constants);
#pragma GCC unroll kUnroll
    for (int r = 0; r < R; ++r) {
      acc[r] = add_group<F>(acc[r], shift_left<4>(high[r]) + low[r], scale, constants, record, row + r);
    }
  }
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

// One tile times blocks begin..end-1.
template <class F>
void multiply_blocks(const Linear& op, const Rows& rows, int64_t tile, int64_t begin, int64_t end) {
  const uint8_t* w = op.weight + tile * rows.groups * record_bytes<F>();
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlockRows, count = std::min(kBlockRows, rows.count - first);
    for (int64_t row = 0; row < count; row += kRows) {
      with_rows<kRows>(count - row, [&](auto n) {
        F32x16 acc[n];
        multiply_tile<F, n>(w, rows.read(block), row, rows.groups, acc);
        for (int r = 0; r < n; ++r) finish(op, first + row + r, tile, acc[r]);
      });
    }
  }
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

// The matrix kernel: a block of rows times a tile is one instruction for each group and digit.

// A tile's weights as the unit takes them: for each group, first 16 * w for the high digits, then w for the low ones.
// The formats of whole bytes are taken as they lie.
template <class F>
const uint8_t* unpack_tile(const uint8_t* w, int64_t groups, uint8_t* panel) {
  if constexpr (!F::kNibbles) return w;
  const __m512i low = _mm512_set1_epi8(0x0f), high = _mm512_set1_epi8(static_cast<char>(0xf0));
  for (int64_t group = 0; group < groups; ++group, w += record_bytes<F>(), panel += 1024) {
    prefetch(w + kPrefetchBytes, record_bytes<F>());
    for (int b = 0; b < F::kBlocks; ++b) {
      const __m512i block = _mm512_loadu_si512(w + b * 64);
      _mm512_store_si512(panel + b * 64, _mm512_and_si512(_mm512_slli_epi16(block, 4), high));
      _mm512_store_si512(panel + b * 64 + 256, _mm512_and_si512(block, high));
      _mm512_store_si512(panel + b * 64 + 512, _mm512_and_si512(block, low));
      _mm512_store_si512(panel + b * 64 + 768, _mm512_and_si512(_mm512_srli_epi16(block, 4), low));
    }
  }
  return panel - groups * 1024;
}

// Integer sums of 16 rows and 16 columns; of the high and the low digits where they come apart.
template <class F>
struct alignas(64) Sums {
  static constexpr int kParts = F::kNibbles ? 1 : 2;
  int32_t part[kParts][16 * 16];

  I32x16 row(int r) const {
    if constexpr (kParts == 1) return load(part[0] + r * 16);
    else return shift_left<4>(load(part[0] + r * 16)) + load(part[1] + r * 16);
  }
};

// The sums of one group.
template <class F>
inline void multiply_group(const uint8_t* w, Record<const uint8_t> record, Sums<F>& sums) {
  tile_load<2>(w);
  tile_load<3>(record.high(0));
  tile_multiply<0, 3, 2>();
  tile_store<0>(sums.part[0]);
  if constexpr (F::kNibbles) return;
  tile_load<3>(record.low(0));
  tile_multiply<1, 3, 2>();
  tile_store<1>(sums.part[1]);
}

// A tile times a block over some groups: adds to the block's sums. `panel` is what unpack_tile returned. The unit works
// one group ahead of the vectors that scale its sums.
template <class F>
void multiply_block(const uint8_t* w, const uint8_t* panel, Record<const uint8_t> record, int64_t groups, float* sums) {
  constexpr int64_t kPanelBytes = F::kNibbles ? 1024 : record_bytes<F>();
  Sums<F> dots[2];
  F32x16 acc[kBlockRows];  // stays in registers only where every loop over it is unrolled
#pragma GCC unroll 16
  for (int r = 0; r < kBlockRows; ++r) acc[r] = load(sums + r * kTileWidth);
  multiply_group<F>(panel, record, dots[0]);
  for (int64_t group = 0; group < groups; ++group, w += record_bytes<F>()) {
    const Record<const uint8_t> here = record;
    record = record.next();
    if (group + 1 < groups) multiply_group<F>(panel += kPanelBytes, record, dots[(group + 1) % 2]);
    const auto* constants = reinterpret_cast<const uint16_t*>(w + F::kBlocks * 64);
    const F32x16 scale = load_f16(constants);
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
      I32x16 dot = dots[group % 2].row(r);
      if constexpr (!F::kOffset) dot = dot + broadcast(read_as<int32_t>(here.correction(r)));
      acc[r] = add_group<F>(acc[r], dot, scale, constants, here, r);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kBlockRows; ++r) store(sums + r * kTileWidth, acc[r]);
}

// What a thread needs beside the tile registers: unpacked weights, and the sums of a tile for each block.
struct MatrixScratch {
  alignas(64) uint8_t panel[kPanelGroups * 1024];
  std::vector<float> sums;
};

// One tile times blocks begin..end-1, by the matrix unit: some groups at a time, so that their unpacked weights stay in
// the first cache while blocks stream.
template <class F>
void multiply_blocks_matrix(const Linear& op, const Rows& rows, int64_t tile, int64_t begin, int64_t end) {
  static thread_local const auto scratch = std::make_unique<MatrixScratch>();
  constexpr int64_t kBlockSums = kBlockRows * kTileWidth;
  scratch->sums.assign((end - begin) * kBlockSums, 0.0f);
  const uint8_t* w = op.weight + tile * rows.groups * record_bytes<F>();
  for (int64_t first = 0; first < rows.groups; first += kPanelGroups, w += kPanelGroups * record_bytes<F>()) {
    const int64_t groups = std::min(kPanelGroups, rows.groups - first);
    const uint8_t* panel = unpack_tile<F>(w, groups, scratch->panel);
    for (int64_t block = begin; block < end; ++block) {
      float* const sums = scratch->sums.data() + (block - begin) * kBlockSums;
      multiply_block<F>(w, panel, rows.read(block).skip(first), groups, sums);
    }
  }
  for (int64_t row = begin * kBlockRows; row < std::min(rows.count, end * kBlockRows); ++row) {
    finish(op, row, tile, load(scratch->sums.data() + (row - begin * kBlockRows) * kTileWidth));
  }
}

#endif

// Calls multiply(tile, first block, last block) for every tile and chunk of blocks, in parallel; `begin_span()` gives
// what is to live while a thread works.
template <class Span, class Multiply>
void for_tiles(const Linear& op, const Rows& rows, Span&& begin_span, Multiply&& multiply) {
  const int64_t block_bytes = kBlockRows * rows.groups * kRowBytes;
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / block_bytes);
  const int64_t chunks = (rows.blocks() + chunk - 1) / chunk, tiles = op.tiles();
  const int64_t products = op.in_features * kTileWidth * std::min(chunk * kBlockRows, op.rows);
  parallel_for(tiles * chunks, std::max<int64_t>(1, kSpanProducts / products), [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const auto span = begin_span();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / tiles * chunk;
      multiply(i % tiles, block, std::min(rows.blocks(), block + chunk));
    }
    if (op.streams) stream_fence();
  });
}

template <class F>
void run(const Linear& op) {
  static thread_local std::vector<uint8_t> scratch;
  const bool by_matrix = kMatrixUnit && op.rows > kVectorRows && has_matrix_unit();
  const int64_t last = by_matrix ? kBlockRows : (op.rows - 1) % kBlockRows + 1;  // the unit takes whole blocks
  Rows rows{nullptr, op.rows, op.in_features / kGroup, last};
  scratch.resize(rows.places() * rows.groups * kRowBytes);
  rows.at = scratch.data();
  parallel_for(rows.places(), std::max<int64_t>(1, kSpanElements / op.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row<F>(op, rows, row);
  });
#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
  if (by_matrix) {
    constexpr int kBytes = F::kNibbles ? 2 * kGroup : kGroup;
    return for_tiles(op, rows, [] { return MatrixUnit(kBytes); }, [&](int64_t tile, int64_t begin, int64_t end) {
      multiply_blocks_matrix<F>(op, rows, tile, begin, end);
    });
  }
#endif
  for_tiles(op, rows, [] { return 0; },
            [&](int64_t tile, int64_t begin, int64_t end) { multiply_blocks<F>(op, rows, tile, begin, end); });
}

}  // namespace

void linear_grouped(const Linear& wanted, Format format) {
  if (wanted.rows == 0) return;
  const Linear op = with_streams(wanted);
  switch (format) {
    case Format::i8g32: return run<Int8>(op);
    case Format::i4g32: return run<Int4>(op);
    default: return run<Int4Symmetric>(op);
  }
}

}  // namespace trnc
