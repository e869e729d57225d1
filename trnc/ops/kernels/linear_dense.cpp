// f32 and bf16 weights: lanes are output features, and each adds up its products over k in sequence with
// one fma each. bf16 is widened exactly, where no matrix unit multiplies it as it is.
#include "buffer.h"
#include "linear_bf16.h"
#include "parallel.h"
#include "tiles.h"

namespace trnc {
namespace {

constexpr int kRows = 4;
constexpr int kTiles = kWide ? 4 : 1;        // independent sums that hide the latency of fma at one row
constexpr int64_t kChunkRows = 64;           // rows that stay in cache while tiles stream
constexpr int64_t kSpanProducts = 1 << 16;

struct F32 {
  static constexpr int kPerVector = 1;  // values of k in 64 bytes of a tile
  template <int i>
  static F32x16 value(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct BF16 {
  static constexpr int kPerVector = 2;
  template <int i>
  static F32x16 value(const uint8_t* p) {
    const I32x16 pair = load(reinterpret_cast<const int32_t*>(p));
    return as_float(i == 0 ? shift_left<16>(pair) : pair & broadcast(static_cast<int32_t>(0xffff0000)));
  }
};

// acc[r][c] += x[r][k] * w[c][k] for one k, the i-th of the vectors at w.
template <class F, int i, int R, int C>
void step(const float* x, int64_t ldx, const uint8_t* w, int64_t ldw, F32x16 (&acc)[R][C]) {
  F32x16 column[C];
#pragma GCC unroll kUnroll
  for (int c = 0; c < C; ++c) column[c] = F::template value<i>(w + c * ldw);
#pragma GCC unroll kUnroll
  for (int r = 0; r < R; ++r) {
    const F32x16 activation = broadcast(x[r * ldx + i]);
#pragma GCC unroll kUnroll
    for (int c = 0; c < C; ++c) acc[r][c] = fma(column[c], activation, acc[r][c]);
  }
}

// Rows row..row+R-1 of tiles tile..tile+C-1.
template <class F, int R, int C>
void multiply_tiles(const Linear& op, int64_t row, int64_t tile, int64_t ldw) {
  const int64_t k = op.in_features;
  const uint8_t* w = op.weight + tile * ldw;
  const float* x = op.x + row * k;
  F32x16 acc[R][C];
  for (auto& sums : acc) for (F32x16& sum : sums) sum = broadcast(0.0f);
  int64_t i = 0;
  for (; i + F::kPerVector <= k; i += F::kPerVector, w += 64) {
    step<F, 0>(x + i, k, w, ldw, acc);
    if constexpr (F::kPerVector == 2) step<F, 1>(x + i, k, w, ldw, acc);
  }
  if (i < k) step<F, 0>(x + i, k, w, ldw, acc);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) finish(op, row + r, tile + c, acc[r][c]);
  }
}

template <class F, int C>
void multiply_rows(const Linear& op, int64_t tile, int64_t begin, int64_t end, int64_t ldw) {
  for (int64_t row = begin; row < end; row += kRows) {
    with_rows<kRows>(end - row, [&](auto rows) { multiply_tiles<F, rows, C>(op, row, tile, ldw); });
  }
}

// The same product of rows that have been through the norm.
Linear with_prepared_rows(const Linear& op) {
  if (!op.norm) return op;
  static thread_local Buffer<float> prepared;
  prepared.resize(op.rows * op.in_features);
  float* const to = prepared.data();
  parallel_for(op.rows, std::max<int64_t>(1, kSpanProducts / 8 / op.in_features), [=, &op](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) prepare_row(op, row, to + row * op.in_features);
  });
  Linear plain = op;
  plain.x = to;
  plain.norm = nullptr;
  return plain;
}

template <class F>
void run(const Linear& op, int64_t ldw) {
  const int64_t tiles = op.tiles(), strips = (tiles + kTiles - 1) / kTiles;
  const int64_t chunks = (op.rows + kChunkRows - 1) / kChunkRows;
  const int64_t products = op.in_features * kTileWidth * kTiles * std::min(kChunkRows, op.rows);
  parallel_for(strips * chunks, std::max<int64_t>(1, kSpanProducts / products),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t row = i / strips * kChunkRows, stop = std::min(op.rows, row + kChunkRows);
                   const int64_t tile = i % strips * kTiles;
                   if (tile + kTiles <= tiles) {
                     multiply_rows<F, kTiles>(op, tile, row, stop, ldw);
                     continue;
                   }
                   for (int64_t t = tile; t < tiles; ++t) multiply_rows<F, 1>(op, t, row, stop, ldw);
                 }
                 if (op.streams) stream_fence();
               });
}

}  // namespace

void linear_dense(const Linear& op, Format format) {
  if (op.rows == 0) return;
  const Linear plain = with_streams(with_prepared_rows(op));
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
  if (format == Format::bf16 && has_matrix_unit()) return linear_bf16_by_matrix(plain);
#endif
  const int64_t ldw = tile_bytes(format, op.in_features);
  return format == Format::f32 ? run<F32>(plain, ldw) : run<BF16>(plain, ldw);
}

}  // namespace trnc
