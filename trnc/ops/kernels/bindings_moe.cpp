#include <string>
#include <tuple>

#include "bindings_packed.h"
#include "moe.h"

namespace trnc {
namespace {

// Throws unless `weight` stacks `count` matrices packed as `format` for `in` features, each for `out` features.
void check_stacked(const Tensor& weight, const char* name, Format format, int64_t count, int64_t out, int64_t in) {
  check(weight, name, ScalarType::Byte, 3);
  const int64_t tiles = (out + kTileWidth - 1) / kTileWidth;
  STD_TORCH_CHECK(format == Format::f32 || format == Format::bf16 || in % kGroup == 0, name,
                  ": in features must be a multiple of 32, got ", in);
  STD_TORCH_CHECK(weight.size(0) == count && weight.size(1) == tiles && weight.size(2) == tile_bytes(format, in), name,
                  " has shape [", weight.size(0), ", ", weight.size(1), ", ", weight.size(2), "], not [", count, ", ",
                  tiles, ", ", tile_bytes(format, in), "]");
}

std::tuple<Tensor, Tensor> route_op(const Tensor& logits, const Tensor& correction, int64_t groups, int64_t top_groups,
                                    int64_t top_k, bool normalize, double scale) {
  check(logits, "route: logits", ScalarType::Float, 2);
  check(correction, "route: correction", ScalarType::Float, 1);
  const int64_t rows = logits.size(0), experts = logits.size(1);
  STD_TORCH_CHECK(correction.size(0) == experts, "route: correction has ", correction.size(0), " elements, not ", experts);
  STD_TORCH_CHECK(groups > 0 && experts % groups == 0 && experts / groups >= 2 && top_groups >= 1 &&
                      top_groups <= groups && top_k >= 1 && top_k <= experts / groups * top_groups,
                  "route: cannot pick ", top_k, " experts out of ", top_groups, " of ", groups, " groups of ", experts);
  Tensor ids = empty({rows, top_k}, ScalarType::Int), weights = empty({rows, top_k}, ScalarType::Float);
  route({read<float>(logits), read<float>(correction), write<int32_t>(ids), write<float>(weights), rows, experts, groups,
         top_groups, top_k, normalize, static_cast<float>(scale)});
  return {ids, weights};
}

Tensor experts_op(const Tensor& x, const Tensor& ids, const Tensor& weights, const Tensor& gate_up, const Tensor& down,
                  std::string_view gate_up_format, std::string_view down_format, int64_t inner) {
  check(x, "experts: x", ScalarType::Float, 2);
  check(ids, "experts: ids", ScalarType::Int, 2);
  check(weights, "experts: weights", ScalarType::Float, 2);
  const int64_t rows = x.size(0), hidden = x.size(1), top_k = ids.size(1), count = gate_up.size(0);
  STD_TORCH_CHECK(ids.size(0) == rows && weights.size(0) == rows && weights.size(1) == top_k,
                  "experts: ids and weights must be [", rows, ", k]");
  const Format wide = format_named(std::string(gate_up_format)), narrow = format_named(std::string(down_format));
  check_stacked(gate_up, "experts: gate_up", wide, count, 2 * inner, hidden);
  check_stacked(down, "experts: down", narrow, count, hidden, inner);
  const int32_t* id = read<int32_t>(ids);
  for (int64_t i = 0; i < rows * top_k; ++i) {
    STD_TORCH_CHECK(id[i] >= 0 && id[i] < count, "experts: id ", id[i], " is not one of ", count);
  }
  Tensor out = empty({rows, hidden}, ScalarType::Float);
  experts({read<float>(x), id, read<float>(weights), read<uint8_t>(gate_up), read<uint8_t>(down), write<float>(out), wide,
           narrow, rows, top_k, count, hidden, inner});
  return out;
}

Tensor head_linear_op(const Tensor& x, const Tensor& weight, std::string_view format_name, int64_t out_features) {
  check(x, "head_linear: x", ScalarType::Float, 3);
  const int64_t rows = x.size(0), heads = x.size(1), in_features = x.size(2);
  const Format format = format_named(std::string(format_name));
  check_stacked(weight, "head_linear: weight", format, heads, out_features, in_features);
  Tensor out = empty({rows, heads, out_features}, ScalarType::Float);
  head_linear({read<float>(x), read<uint8_t>(weight), write<float>(out), format, rows, heads, in_features, out_features});
  return out;
}

}  // namespace
}  // namespace trnc

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("route", TORCH_BOX(&trnc::route_op));
  m.impl("experts", TORCH_BOX(&trnc::experts_op));
  m.impl("head_linear", TORCH_BOX(&trnc::head_linear_op));
}
