// Which kernel multiplies by a format, and the gate where that one does not have it.
#include "buffer.h"
#include "kernels.h"

namespace trnc {
namespace {

bool takes_gate(const Linear& op, Format format) {
  return (format == Format::i4g32 || format == Format::i4g32s) && op.out_width() % kTileWidth == 0;
}

void linear_then_gate(const Linear& op, Format format) {
  static thread_local Buffer<float> gate_up;
  grow(gate_up, op.rows * op.out_features);
  Linear plain = op;
  plain.out = gate_up.data();
  plain.gated = false;
  linear(plain, format);
  silu_mul(gate_up.data(), op.out, op.rows, op.out_width());
}

}  // namespace

void linear(const Linear& op, Format format) {
  if (op.gated && !takes_gate(op, format)) return linear_then_gate(op, format);
  format == Format::f32 || format == Format::bf16 ? linear_dense(op, format) : linear_grouped(op, format);
}

}  // namespace trnc
