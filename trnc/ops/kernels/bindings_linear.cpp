#include "bindings_packed.h"

#include <algorithm>
#include <optional>
#include <string>

#include "parallel.h"

namespace trnc {
namespace {

// Throws unless an optional tensor of `shape` fits; returns its data, or null.
const float* optional_data(const std::optional<Tensor>& tensor, const char* name, std::initializer_list<int64_t> shape) {
  if (!tensor) return nullptr;
  check(*tensor, name, ScalarType::Float, static_cast<int64_t>(shape.size()));
  int64_t dim = 0;
  for (int64_t size : shape) {
    STD_TORCH_CHECK(tensor->size(dim) == size, name, " has ", tensor->size(dim), " elements, not ", size);
    ++dim;
  }
  return read<float>(*tensor);
}

Tensor fused_linear_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& norm, const std::optional<Tensor>& residual,
                       std::string_view format_name, int64_t out_features, double eps, bool gated) {
  check(x, "linear: x", ScalarType::Float, 2);
  const int64_t rows = x.size(0), in_features = x.size(1);
  STD_TORCH_CHECK(!gated || (out_features % 2 == 0 && !residual), "linear: gated features are even and have no residual");
  const Format format = format_named(std::string(format_name));
  Tensor out = empty({rows, gated ? out_features / 2 : out_features}, ScalarType::Float);
  Linear op{read<float>(x), read<uint8_t>(weight), write<float>(out), rows, in_features, out_features};
  check_packed(weight, "linear: weight", format, in_features, op.tiles());
  op.bias = optional_data(bias, "linear: bias", {out_features});
  op.norm = optional_data(norm, "linear: norm", {in_features});
  op.residual = optional_data(residual, "linear: residual", {rows, out_features});
  op.eps = static_cast<float>(eps);
  op.gated = gated;
  linear(op, format);
  return out;
}

Tensor linear_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, std::string_view format,
                 int64_t out_features) {
  return fused_linear_op(x, weight, bias, std::nullopt, std::nullopt, format, out_features, 0.0, false);
}

Tensor embedding_op(const Tensor& ids, const Tensor& weight, std::string_view format_name, int64_t width) {
  check(ids, "embedding: ids", ScalarType::Long, 1);
  const Format format = format_named(std::string(format_name));
  check_packed(weight, "embedding: weight", format, width, 1);
  Tensor out = empty({ids.size(0), width}, ScalarType::Float);
  const int64_t* id = read<int64_t>(ids);
  const int64_t rows = ids.size(0), limit = weight.size(0) * kTileWidth;
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(id[row] < limit, "embedding: id ", id[row], " is not below ", limit);
  }
  const uint8_t* table = read<uint8_t>(weight);
  float* to = write<float>(out);
  parallel_for(rows, std::max<int64_t>(1, 16384 / (width + 1)), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (id[row] < 0) std::fill_n(to + row * width, width, 0.0f);
      else unpack_row(table, format, id[row], to + row * width, width);
    }
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  check(x, "rms_norm: x", ScalarType::Float, 2);
  check(weight, "rms_norm: weight", ScalarType::Float, 1);
  const int64_t rows = x.size(0), width = x.size(1);
  STD_TORCH_CHECK(weight.size(0) == width, "rms_norm: weight has ", weight.size(0), " elements, x ", width);
  Tensor out = empty({rows, width}, ScalarType::Float);
  rms_norm(read<float>(x), read<float>(weight), write<float>(out), rows, width, static_cast<float>(eps));
  return out;
}

Tensor silu_mul_op(const Tensor& gate_up) {
  check(gate_up, "silu_mul: gate_up", ScalarType::Float, 2);
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "silu_mul: gate_up must have an even width");
  Tensor out = empty({rows, width}, ScalarType::Float);
  silu_mul(read<float>(gate_up), write<float>(out), rows, width);
  return out;
}

void set_num_threads_op(int64_t n) {
  STD_TORCH_CHECK(n >= 1, "set_num_threads: n must be at least 1, got ", n);
  set_num_threads(static_cast<int>(n));
}

int64_t num_threads_op() { return num_threads(); }

}  // namespace
}  // namespace trnc

TRNC_SHIM aoti_torch_cpu_fused_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                      AtenTensorHandle* norm, AtenTensorHandle* residual, const char* format,
                                      int64_t out_features, double eps, int32_t gated, AtenTensorHandle* result) {
  using trnc::borrow;
  return trnc::give(result, [=] {
    return trnc::fused_linear_op(borrow(x), borrow(weight), borrow(bias), borrow(norm), borrow(residual), format,
                                 out_features, eps, gated != 0);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(trnc, m) {
  m.def("set_num_threads(int n) -> ()");
  m.def("num_threads() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(trnc, CompositeExplicitAutograd, m) {
  m.impl("set_num_threads", TORCH_BOX(&trnc::set_num_threads_op));
  m.impl("num_threads", TORCH_BOX(&trnc::num_threads_op));
}

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("linear", TORCH_BOX(&trnc::linear_op));
  m.impl("fused_linear", TORCH_BOX(&trnc::fused_linear_op));
  m.impl("embedding", TORCH_BOX(&trnc::embedding_op));
  m.impl("rms_norm", TORCH_BOX(&trnc::rms_norm_op));
  m.impl("silu_mul", TORCH_BOX(&trnc::silu_mul_op));
}
