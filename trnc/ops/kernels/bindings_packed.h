// What bindings of packed weights share.
#pragma once

#include <string>

#include "bindings.h"
#include "kernels.h"

namespace trnc {

inline Format format_named(const std::string& name) {
  if (name == "f32") return Format::f32;
  if (name == "bf16") return Format::bf16;
  if (name == "i8g32") return Format::i8g32;
  if (name == "i4g32") return Format::i4g32;
  STD_TORCH_CHECK(name == "i4g32s", "weight format ", name, " is unknown");
  return Format::i4g32s;
}

// Throws unless `weight` is packed as `format` for `width` in features and at least `tiles` tiles.
inline void check_packed(const Tensor& weight, const char* name, Format format, int64_t width, int64_t tiles) {
  check(weight, name, ScalarType::Byte, 2);
  STD_TORCH_CHECK(format == Format::f32 || format == Format::bf16 || width % kGroup == 0, name,
                  ": in features must be a multiple of 32, got ", width);
  STD_TORCH_CHECK(weight.size(0) >= tiles && weight.size(1) == tile_bytes(format, width), name, " has ",
                  weight.size(0), " tiles of ", weight.size(1), " bytes; ", width, " in features need ", tiles,
                  " tiles of ", tile_bytes(format, width));
}

}  // namespace trnc
