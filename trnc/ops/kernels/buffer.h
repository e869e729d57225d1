// A vector that begins at a cache line: a load of 64 bytes that crosses one costs two, and a tile of the matrix unit is
// sixteen of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace trnc {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class U>
  explicit LineAllocator(const LineAllocator<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <class T>
using Buffer = std::vector<T, LineAllocator<T>>;

// Makes room for n elements; never shrinks.
template <class T>
void grow(Buffer<T>& buffer, int64_t n) {
  if (static_cast<int64_t>(buffer.size()) < n) buffer.resize(n);
}

}  // namespace trnc
