// What the binding files share: the only files that see torch, through its stable ABI (light to compile,
// and one binary for torch 2.11 and later). Kernels take plain pointers; kernels.h declares them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>

namespace trnc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws, naming the argument, unless `tensor` is contiguous with this dtype and number of dimensions.
inline void check(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dims) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.dim() == dims && tensor.is_contiguous(), name,
                  ": expected a contiguous tensor of ", dims, " dimensions and dtype ", dtype, ", got ",
                  tensor.dim(), " dimensions and dtype ", tensor.scalar_type());
}

template <class T>
const T* read(const Tensor& tensor) { return static_cast<const T*>(tensor.const_data_ptr()); }

template <class T>
T* write(const Tensor& tensor) { return static_cast<T*>(tensor.mutable_data_ptr()); }

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

}  // namespace trnc
