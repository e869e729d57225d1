// What the binding files share: the only files that see torch, through its stable ABI (light to compile,
// and one binary for torch 2.11 and later). Kernels take plain pointers; kernels.h declares them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <exception>
#include <initializer_list>
#include <optional>

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

// An uninitialised contiguous tensor in the processor's memory.
inline Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype) {
  int64_t strides[8], stride = 1, dims = static_cast<int64_t>(shape.size());
  for (int64_t i = dims - 1; i >= 0; stride *= shape.begin()[i--]) strides[i] = stride;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, shape.begin(), strides, static_cast<int32_t>(dtype),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// C entries that compiled stages call past the dispatcher (trnc/compiler/backends/lowering.py declares them):
// they borrow their tensors, hand over their result, and report a failure on stderr and as an error code.
#define TRNC_SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

inline Tensor borrow(AtenTensorHandle handle) {
  AtenTensorHandle own;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

inline std::optional<Tensor> borrow(const AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(borrow(*handle)) : std::nullopt;
}

template <class Fn>
AOTITorchError give(AtenTensorHandle* result, Fn&& compute) {
  try {
    const Tensor value = compute();
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(value.get(), result));
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace trnc
