// rms_norm and silu_mul: small, bound by the call, so threads help only for many rows.
#include "kernels.h"
#include "parallel.h"
#include "rows.h"

namespace trnc {
namespace {

constexpr int64_t kGrain = 16384;  // elements that are worth waking a thread for

int64_t rows_per_span(int64_t width) { return width >= kGrain ? 1 : kGrain / width; }

}  // namespace

void rms_norm(const float* x, const float* weight, float* out, int64_t rows, int64_t width, float eps) {
  parallel_for(rows, rows_per_span(width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row(x + row * width, weight, eps, out + row * width, width);
  });
}

void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t width) {
  parallel_for(rows, rows_per_span(width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) silu_mul_row(gate_up + row * 2 * width, out + row * width, width);
  });
}

}  // namespace trnc
