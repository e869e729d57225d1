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

// out = norm(x) W^T + bias + residual, with RMSNorm where there is a `norm`. Where it is `gated`, the out features are a
// gate and then as many up, out has silu(gate) * up, and there is no residual.
struct Linear {
  const float* x;         // [rows, in_features]
  const uint8_t* weight;  // packed
  float* out;             // [rows, out_features], or half as wide where gated
  int64_t rows, in_features, out_features;
  const float* bias = nullptr;      // [out_features]
  const float* residual = nullptr;  // [rows, out_features]
  const float* norm = nullptr;      // [in_features]
  float eps = 0.0f;
  bool gated = false;
  bool streams = false;  // outputs go past the caches

  int64_t tiles() const { return (out_features + kTileWidth - 1) / kTileWidth; }
  int64_t out_width() const { return gated ? out_features / 2 : out_features; }
};

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps);
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width);
void linear(const Linear& op, Format format);

// What it calls: linear_dense for f32 and bf16; linear_grouped for the other formats, where `gated` needs nibbles and gates
// that fill their tiles.
void linear_dense(const Linear& op, Format format);
void linear_grouped(const Linear& op, Format format);

// Writes row `id` of a packed weight, widened to f32, to out [width].
void unpack_row(const uint8_t* weight, Format format, int64_t id, float* out, int64_t width);

}  // namespace trnc
