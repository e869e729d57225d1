#include <algorithm>
#include <cstring>

#include "attention.h"
#include "parallel.h"
#include "rounding.h"
#include "simd.h"

namespace trnc {
namespace {

// Writes one sequence's rows that fall into one page.
template <class T>
void write_page(const PagedKeys& keys, const Sequence& seq, const int32_t* table, int64_t block) {
  const int64_t d = keys.head_dim, stored = keys.row_size, size = keys.page_size;
  const int64_t begin = std::max<int64_t>(seq.start, block * size);
  const int64_t end = std::min<int64_t>(seq.start + seq.count, (block + 1) * size);
  for (int64_t head = 0; head < keys.kv_heads; ++head) {
    const int64_t page = (table[block] * keys.kv_heads + head) * stored * size;
    T* k = static_cast<T*>(keys.k_pages) + page;
    T* v = static_cast<T*>(keys.v_pages) + page;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t slot = position - block * size;
      const int64_t row = ((seq.first + position - seq.start) * keys.kv_heads + head) * stored;
      const T* key = static_cast<const T*>(keys.k_new) + row;
      const T* value = static_cast<const T*>(keys.v_new) + row;
      if constexpr (sizeof(T) == 1) {
        for (int64_t i = 0; i < d; ++i) k[(i / 4 * size + slot) * 4 + i % 4] = key[i];
        for (int64_t i = 0; i < d; ++i) v[(slot / 4 * d + i) * 4 + slot % 4] = value[i];
        std::memcpy(k + d * size + slot * 4, key + d, 4);  // the scale, of four bytes
        std::memcpy(v + d * size + slot * 4, value + d, 4);
      } else {
        for (int64_t i = 0; i < d; ++i) k[i * size + slot] = key[i];
        std::memcpy(v + slot * d, value, d * sizeof(T));
      }
    }
  }
}

template <class T>
void write_pages(const PagedKeys& keys) {
  for (int64_t i = 0; i < keys.num_sequences; ++i) {
    const Sequence& seq = keys.sequences[i];
    if (seq.count == 0) continue;
    const int64_t first = seq.start / keys.page_size;
    const int64_t last = (seq.start + seq.count - 1) / keys.page_size;
    const int32_t* table = keys.block_tables + i * keys.table_width;
    parallel_for(last - first + 1, 4, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) write_page<T>(keys, seq, table, first + block);
    });
  }
}

void quantize_row(const float* x, int8_t* out, int64_t width) {
  const auto [scale, inverse] = rounding_of(largest_magnitude(x, width), 127.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    int8_t q[kLanes];
    store_i8(q, to_int(load_n(x + i, static_cast<int>(width - i)) * broadcast(inverse)));
    std::memcpy(out + i, q, std::min<int64_t>(kLanes, width - i));
  }
  std::memcpy(out + width, &scale, sizeof scale);
}

}  // namespace

void kv_write(const PagedKeys& keys) {
  switch (keys.type) {
    case CacheType::f32: return write_pages<uint32_t>(keys);
    case CacheType::i8: return write_pages<uint8_t>(keys);
    default: return write_pages<uint16_t>(keys);
  }
}

void quantize_kv(const float* x, int8_t* out, int64_t rows, int64_t width) {
  parallel_for(rows, std::max<int64_t>(1, 16384 / width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_row(x + row * width, out + row * (width + 4), width);
  });
}

}  // namespace trnc
