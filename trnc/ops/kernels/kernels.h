// The kernels of the norm, linear and embedding ops, on plain pointers. Shapes are those of the ops in
// trnc/ops; every row's bits depend on that row alone.
#pragma once

#include <cstdint>

namespace trnc {

// trnc/ops/packing.py describes the layouts.
enum class Format { f32, bf16, i8g32, i4g32, i4g32s };

constexpr int64_t kGroup = 32;
constexpr int64_t kTileWidth = 16;

// Bytes of one tile of 16 output features.
constexpr int64_t tile_bytes(Format format, int64_t in_features) {
  switch (format) {
    case Format::f32: return in_features * 64;
    case Format::bf16: return (in_features + 1) / 2 * 64;
    case Format::i8g32: return in_features / kGroup * 544;
    case Format::i4g32: return in_features / kGroup * 320;
    case Format::i4g32s: return in_features / kGroup * 288;
  }
  return 0;
}

// out = prologue(x) W^T + bias + residual. The prologue of a row is RMSNorm where there is a `norm`, silu(a) * b of
// its halves where it is `gated`, or nothing.
struct Linear {
  const float* x;         // [rows, in_features], or twice as wide where gated
  const uint8_t* weight;  // packed
  float* out;             // [rows, out_features]
  int64_t rows, in_features, out_features;
  const float* bias = nullptr;      // [out_features]
  const float* residual = nullptr;  // [rows, out_features]
  const float* norm = nullptr;      // [in_features]
  float eps = 0.0f;
  bool gated = false;
  bool streams = false;  // outputs go past the caches

  int64_t tiles() const { return (out_features + kTileWidth - 1) / kTileWidth; }
};

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps);
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width);
void linear_dense(const Linear& op, Format format);    // f32, bf16
void linear_grouped(const Linear& op, Format format);  // i8g32, i4g32, i4g32s

inline void linear(const Linear& op, Format format) {
  format == Format::f32 || format == Format::bf16 ? linear_dense(op, format) : linear_grouped(op, format);
}

// Writes row `id` of a packed weight, widened to f32, to out [width].
void unpack_row(const uint8_t* weight, Format format, int64_t id, float* out, int64_t width);

}  // namespace trnc
