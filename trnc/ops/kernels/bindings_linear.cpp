#include "bindings.h"

#include "kernels.h"
#include "parallel.h"

namespace trnc {
namespace {

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps) {
  check(x, "rms_norm: x", ScalarType::Float, 2);
  check(weight, "rms_norm: weight", ScalarType::Float, 1);
  const int64_t rows = x.size(0), width = x.size(1);
  STD_TORCH_CHECK(weight.size(0) == width, "rms_norm: weight has ", weight.size(0), " elements, x ", width);
  Tensor out = empty(x, {rows, width}, ScalarType::Float);
  rms_norm(read<float>(x), read<float>(weight), write<float>(out), rows, width, static_cast<float>(eps));
  return out;
}

Tensor silu_mul_op(const Tensor& gate_up) {
  check(gate_up, "silu_mul: gate_up", ScalarType::Float, 2);
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "silu_mul: gate_up must have an even width");
  Tensor out = empty(gate_up, {rows, width}, ScalarType::Float);
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

STABLE_TORCH_LIBRARY_FRAGMENT(trnc, m) {
  m.def("set_num_threads(int n) -> ()");
  m.def("num_threads() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(trnc, CompositeExplicitAutograd, m) {
  m.impl("set_num_threads", TORCH_BOX(&trnc::set_num_threads_op));
  m.impl("num_threads", TORCH_BOX(&trnc::num_threads_op));
}

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&trnc::rms_norm_op));
  m.impl("silu_mul", TORCH_BOX(&trnc::silu_mul_op));
}
