// The kernels of the norm, linear and embedding ops, on plain pointers. Shapes are those of the ops in
// trnc/ops; every row's bits depend on that row alone.
#pragma once

#include <cstdint>

namespace trnc {

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps);
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width);

}  // namespace trnc
