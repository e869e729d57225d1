// Single rows of packed weights, widened to f32 with the arithmetic of the reference.
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace trnc {
namespace {

template <class T>
T read_at(const uint8_t* tile, int64_t index) {
  T value;
  std::memcpy(&value, tile + index * sizeof(T), sizeof value);
  return value;
}

// The constants after a record's blocks, of all 16 features; `column` picks one.
float constant(const uint8_t* p, int64_t column) {
  float wide[kLanes];
  store(wide, load_f16(reinterpret_cast<const uint16_t*>(p)));
  return wide[column];
}

void unpack_groups(const uint8_t* tile, Format format, int64_t column, float* out, int64_t width) {
  const int64_t record = tile_bytes(format, kGroup), blocks = format == Format::i8g32 ? 512 : 256;
  for (int64_t group = 0; group < width / kGroup; ++group, tile += record, out += kGroup) {
    const float scale = constant(tile + blocks, column);
    const float offset = format == Format::i4g32 ? constant(tile + blocks + 32, column) : 0.0f;
    for (int64_t i = 0; i < kGroup; ++i) {
      const int64_t at = column * 4 + i % 4;
      const int q = format == Format::i8g32 ? tile[i / 4 * 64 + at] - 128
                    : i < 16                ? tile[i / 4 * 64 + at] & 15
                                            : tile[(i - 16) / 4 * 64 + at] >> 4;
      out[i] = format == Format::i4g32s ? static_cast<float>(q - 8) * scale
                                        : static_cast<float>(q) * scale + offset;
    }
  }
}

}  // namespace

void unpack_row(const uint8_t* weight, Format format, int64_t id, float* out, int64_t width) {
  const uint8_t* tile = weight + id / kTileWidth * tile_bytes(format, width);
  const int64_t column = id % kTileWidth;
  if (format == Format::f32) {
    for (int64_t k = 0; k < width; ++k) out[k] = read_at<float>(tile, k * kTileWidth + column);
  } else if (format == Format::bf16) {
    for (int64_t k = 0; k < width; ++k) {
      const uint32_t bits = read_at<uint16_t>(tile, (k / 2 * kTileWidth + column) * 2 + k % 2);
      const uint32_t wide = bits << 16;
      std::memcpy(out + k, &wide, sizeof wide);
    }
  } else {
    unpack_groups(tile, format, column, out, width);
  }
}

}  // namespace trnc
