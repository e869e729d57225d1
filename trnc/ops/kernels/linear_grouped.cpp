// Grouped integer weights times quantised activations (quantize.h).
//
// One output adds up a span of groups, one after the other, sum = fma(float(dot), scale_w, sum), where dot is the exact
// integer sum of the group, and for formats with offsets sum = fma(offset_w, float(sum(a)), sum). Formats that store q +
// bias start the integer sum at -bias * sum(a) instead. Then the spans, acc = fma(sum, scale_a, acc). Nothing of this
// depends on how rows are blocked, nor on whether vectors or the matrix unit made the integer sum.
#include <memory>

#include "buffer.h"
#include "matrix_unit.h"
#include "parallel.h"
#include "quantize.h"
#include "tiles.h"

namespace trnc {
namespace {

constexpr int kRows = kWide ? 8 : 4;         // rows of a vector kernel that share one unpacking of the weights
constexpr int64_t kVectorRows = 8;           // so few rows do not repay what the matrix unit needs unpacked
constexpr int64_t kChunkBytes = 256 * 1024;  // quantised rows that stay in L2 while tiles stream
constexpr int64_t kPairBlocks = 3;           // blocks from which on two tiles repay sharing what is loaded of rows
constexpr int64_t kGrainElements = 2048;     // elements that are worth waking a thread for, to quantise
constexpr int64_t kGrainProducts = 1 << 17;  // multiplications that are worth waking a thread for
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
  Buffer<uint8_t> digits;
  Buffer<float> scales;  // [spans, room] of each block
  int64_t count = 0, groups = 0, last = 0;

  void fit(int64_t rows, int64_t groups_of_row, int64_t room_of_last) {
    count = rows, groups = groups_of_row, last = room_of_last;
    digits.resize(places() * groups * kRowBytes);
    scales.resize(places() * spans());
  }
  int64_t spans() const { return (groups + kSpanGroups - 1) / kSpanGroups; }
  int64_t places() const { return (blocks() - 1) * kBlockRows + last; }
  int64_t blocks() const { return (count + kBlockRows - 1) / kBlockRows; }
  int64_t room(int64_t block) const { return block + 1 < blocks() ? kBlockRows : last; }
  Record<uint8_t> record(int64_t block) { return {digits.data() + block * kBlockRows * groups * kRowBytes, room(block)}; }
  Record<const uint8_t> read(int64_t block) const {
    return {digits.data() + block * kBlockRows * groups * kRowBytes, room(block)};
  }
  // The scales of a span of a block's rows.
  float* scale(int64_t block, int64_t span) {
    return scales.data() + block * kBlockRows * spans() + span * room(block);
  }
  const float* scale(int64_t block, int64_t span) const { return const_cast<Rows*>(this)->scale(block, span); }
};

// Quantises row `row`, or fills its place with zeros where it is past the last one.
template <class F>
void quantize_row(const Linear& op, Rows& rows, int64_t row) {
  static thread_local Buffer<float> scratch;
  scratch.resize(op.in_features);
  const float* x = row < rows.count ? prepare_row(op, row, scratch.data()) : nullptr;
  const int64_t block = row / kBlockRows, place = row % kBlockRows;
  Record<uint8_t> record = rows.record(block);
  for (int64_t first = 0; first < rows.groups; first += kSpanGroups, record = record.skip(kSpanGroups)) {
    const int64_t groups = std::min(kSpanGroups, rows.groups - first);
    if (!x) clear_row(record, groups, place);
    rows.scale(block, first / kSpanGroups)[place] =
        x ? quantize_span<F::kBias>(x + first * kGroup, groups, record, place) : 0.0f;
  }
}

// sum += the products of one group of a tile, from their integer sum; `correction` is not in `dot` yet.
template <class F>
inline F32x16 add_group(F32x16 sum, I32x16 dot, F32x16 scale, const uint16_t* constants, Record<const uint8_t> record,
                        int64_t row) {
  sum = fma(to_float(dot), scale, sum);
  if constexpr (F::kOffset) {
    sum = fma(load_f16(constants + kLanes), broadcast(read_as<float>(record.correction(row))), sum);
  }
  return sum;
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

// A span of a tile times the R rows from `row` on of a block: sum[r] = sum over its groups.
template <class F, int R>
inline void multiply_span(const uint8_t* w, Record<const uint8_t> record, int64_t row, int64_t groups, F32x16 (&sum)[R]) {
  for (int r = 0; r < R; ++r) sum[r] = broadcast(0.0f);
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
      sum[r] = add_group<F>(sum[r], shift_left<4>(high[r]) + low[r], scale, constants, record, row + r);
    }
  }
}

// One tile times the R rows from `row` on of a block: acc[r] = sum over spans.
template <class F, int R>
void multiply_tile(const uint8_t* w, const Rows& rows, int64_t block, int64_t row, F32x16 (&acc)[R]) {
  Record<const uint8_t> record = rows.read(block);
  for (int r = 0; r < R; ++r) acc[r] = broadcast(0.0f);
  for (int64_t first = 0; first < rows.groups; first += kSpanGroups, record = record.skip(kSpanGroups)) {
    F32x16 sum[R];
    multiply_span<F, R>(w + first * record_bytes<F>(), record, row, std::min(kSpanGroups, rows.groups - first), sum);
    const float* const scale = rows.scale(block, first / kSpanGroups) + row;
    for (int r = 0; r < R; ++r) acc[r] = fma(sum[r], broadcast(scale[r]), acc[r]);
  }
}

// One tile times blocks begin..end-1, and the tile of up that belongs to it where it is one of a gate.
template <class F>
void multiply_blocks(const Linear& op, const Rows& rows, int64_t tile, int64_t begin, int64_t end) {
  const int64_t tile_size = rows.groups * record_bytes<F>();
  const uint8_t* const w = op.weight + tile * tile_size;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kBlockRows, count = std::min(kBlockRows, rows.count - first);
    for (int64_t row = 0; row < count; row += kRows) {
      with_rows<kRows>(count - row, [&](auto n) {
        F32x16 acc[n], up[n];
        multiply_tile<F, n>(w, rows, block, row, acc);
        if (op.gated) {
          multiply_tile<F, n>(w + op.tiles() / 2 * tile_size, rows, block, row, up);
          for (int r = 0; r < n; ++r) finish_gated(op, first + row + r, tile, acc[r], up[r]);
        } else {
          for (int r = 0; r < n; ++r) finish(op, first + row + r, tile, acc[r]);
        }
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

// Groups of a tile: as they are stored, and as unpack_tile returned them.
struct Panel {
  const uint8_t *stored, *unpacked;
};

template <class F>
constexpr int64_t kPanelBytes = F::kNibbles ? 1024 : record_bytes<F>();

// A block's sums with one tile over a span.
struct SpanSums {
  F32x16 row[kBlockRows];  // stays in registers only where every loop over it is unrolled

  SpanSums() {
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) row[r] = broadcast(0.0f);
  }
  // Adds the products of a group of the tile, which is stored at `w`.
  template <class F>
  void add(const Sums<F>& dots, const uint8_t* w, Record<const uint8_t> record) {
    const auto* constants = reinterpret_cast<const uint16_t*>(w + F::kBlocks * 64);
    const F32x16 scale = load_f16(constants);
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
      I32x16 dot = dots.row(r);
      if constexpr (!F::kOffset) dot = dot + broadcast(read_as<int32_t>(record.correction(r)));
      row[r] = add_group<F>(row[r], dot, scale, constants, record, r);
    }
  }
  void add_to(float* sums, const float* scale) const {
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
      float* const at = sums + r * kTileWidth;
      store(at, fma(row[r], broadcast(scale[r]), load(at)));
    }
  }
};

// A tile times a block over a span: adds to the block's sums. The unit works one group ahead of the vectors that scale
// its sums.
template <class F>
void multiply_block(Panel w, Record<const uint8_t> record, const float* scale, int64_t groups, float* sums) {
  Sums<F> dots[2];
  SpanSums span;
  multiply_group<F>(w.unpacked, record, dots[0]);
  for (int64_t group = 0; group < groups; ++group, w.stored += record_bytes<F>()) {
    const Record<const uint8_t> here = record;
    record = record.next();
    if (group + 1 < groups) multiply_group<F>(w.unpacked += kPanelBytes<F>, record, dots[(group + 1) % 2]);
    span.template add<F>(dots[group % 2], w.stored, here);
  }
  span.add_to(sums, scale);
}

// Two tiles of nibbles times a block. The unit makes all integer sums first, loading the rows once for both tiles.
template <class F>
void multiply_block_pair(const Panel (&w)[2], Record<const uint8_t> record, const float* scale, int64_t groups,
                         float* sums) {
  Sums<F> dots[2][kSpanGroups];
  Record<const uint8_t> here = record;
  for (int64_t group = 0; group < groups; ++group, here = here.next()) {
    tile_load<3>(here.high(0));
    tile_load<2>(w[0].unpacked + group * kPanelBytes<F>);
    tile_multiply<0, 3, 2>();
    tile_store<0>(dots[0][group].part[0]);
    tile_load<2>(w[1].unpacked + group * kPanelBytes<F>);
    tile_multiply<1, 3, 2>();
    tile_store<1>(dots[1][group].part[0]);
  }
  for (int t = 0; t < 2; ++t, sums += kBlockRows * kTileWidth) {
    SpanSums span;
    here = record;
    for (int64_t group = 0; group < groups; ++group, here = here.next()) {
      span.template add<F>(dots[t][group], w[t].stored + group * record_bytes<F>(), here);
    }
    span.add_to(sums, scale);
  }
}

// What a thread needs beside the tile registers: unpacked weights, and the sums of its tiles for each block.
struct MatrixScratch {
  alignas(64) uint8_t panel[2][kSpanGroups * 1024];
  Buffer<float> sums;
};

constexpr int64_t kTileSums = kBlockRows * kTileWidth;

// Adds the products of T tiles and blocks begin..end-1 to their sums, [blocks, Tiles, 16, 16] from `sums` on: a span at a
// time, so that its unpacked weights stay in the first cache while blocks stream.
template <class F, int T, int Tiles>
void add_tiles(const Linear& op, const Rows& rows, const int64_t (&tile)[T], int64_t begin, int64_t end,
               MatrixScratch& scratch, float* sums) {
  for (int64_t first = 0; first < rows.groups; first += kSpanGroups) {
    const int64_t groups = std::min(kSpanGroups, rows.groups - first);
    Panel w[T];
    for (int t = 0; t < T; ++t) {
      w[t].stored = op.weight + (tile[t] * rows.groups + first) * record_bytes<F>();
      w[t].unpacked = unpack_tile<F>(w[t].stored, groups, scratch.panel[t]);
    }
    for (int64_t block = begin; block < end; ++block) {
      float* const at = sums + (block - begin) * Tiles * kTileSums;
      const Record<const uint8_t> record = rows.read(block).skip(first);
      const float* const scale = rows.scale(block, first / kSpanGroups);
      if constexpr (T == 1) multiply_block<F>(w[0], record, scale, groups, at);
      else multiply_block_pair<F>(w, record, scale, groups, at);
    }
  }
}

// T tiles times blocks begin..end-1, by the matrix unit.
template <class F, int T>
void multiply_blocks_matrix(const Linear& op, const Rows& rows, const int64_t (&tile)[T], int64_t begin, int64_t end) {
  static thread_local const auto scratch = std::make_unique<MatrixScratch>();
  scratch->sums.assign((end - begin) * T * kTileSums, 0.0f);
  if (T == 1 || rows.blocks() >= kPairBlocks) {
    add_tiles<F, T, T>(op, rows, tile, begin, end, *scratch, scratch->sums.data());
  } else {
    for (int t = 0; t < T; ++t) {
      add_tiles<F, 1, T>(op, rows, {tile[t]}, begin, end, *scratch, scratch->sums.data() + t * kTileSums);
    }
  }
  for (int64_t row = begin * kBlockRows; row < std::min(rows.count, end * kBlockRows); ++row) {
    const int64_t block = row / kBlockRows - begin;
    const float* const sums = scratch->sums.data() + block * T * kTileSums + row % kBlockRows * kTileWidth;
    if (T == 2 && op.gated) {
      finish_gated(op, row, tile[0], load(sums), load(sums + kTileSums));
    } else {
      for (int t = 0; t < T; ++t) finish(op, row, tile[t], load(sums + t * kTileSums));
    }
  }
}

#endif

// Calls multiply(tile, first block, last block) for every `Tiles`-th tile, of the gate where there is one, and chunk of
// blocks, in parallel; `begin_span()` gives what is to live while a thread works.
template <int Tiles, class Span, class Multiply>
void for_tiles(const Linear& op, const Rows& rows, Span&& begin_span, Multiply&& multiply) {
  const int64_t block_bytes = kBlockRows * rows.groups * kRowBytes;
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / block_bytes);
  const int64_t chunks = (rows.blocks() + chunk - 1) / chunk;
  const int64_t strips = ((op.gated ? op.tiles() / 2 : op.tiles()) + Tiles - 1) / Tiles;
  const int64_t products = op.in_features * op.out_features / strips * std::min(chunk * kBlockRows, op.rows);
  parallel_for(strips * chunks, std::max<int64_t>(1, kGrainProducts / products), [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const auto span = begin_span();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / strips * chunk;
      multiply(i % strips * Tiles, block, std::min(rows.blocks(), block + chunk));
    }
    if (op.streams) stream_fence();
  });
}

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)

template <class F>
void run_matrix(const Linear& op, const Rows& rows) {
  const auto unit = [] { return MatrixUnit(F::kNibbles ? 2 * kGroup : kGroup); };
  const auto one = [&](int64_t tile, int64_t begin, int64_t end) {
    multiply_blocks_matrix<F, 1>(op, rows, {tile}, begin, end);
  };
  if constexpr (F::kNibbles) {
    if (op.gated) {
      return for_tiles<1>(op, rows, unit, [&](int64_t tile, int64_t begin, int64_t end) {
        multiply_blocks_matrix<F, 2>(op, rows, {tile, tile + op.tiles() / 2}, begin, end);
      });
    }
    if (rows.blocks() >= kPairBlocks) {
      return for_tiles<2>(op, rows, unit, [&](int64_t tile, int64_t begin, int64_t end) {
        if (tile + 2 > op.tiles()) return one(tile, begin, end);
        multiply_blocks_matrix<F, 2>(op, rows, {tile, tile + 1}, begin, end);
      });
    }
  }
  for_tiles<1>(op, rows, unit, one);
}

#endif

template <class F>
void run(const Linear& op) {
  static thread_local Rows of_thread;
  Rows& rows = of_thread;
  const bool by_matrix = kMatrixUnit && op.rows > kVectorRows && has_matrix_unit();
  const int64_t last = by_matrix ? kBlockRows : (op.rows - 1) % kBlockRows + 1;  // the unit takes whole blocks
  rows.fit(op.rows, op.in_features / kGroup, last);
  parallel_for(rows.places(), std::max<int64_t>(1, kGrainElements / op.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row<F>(op, rows, row);
  });
#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
  if (by_matrix) return run_matrix<F>(op, rows);
#endif
  for_tiles<1>(op, rows, [] { return 0; },
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
