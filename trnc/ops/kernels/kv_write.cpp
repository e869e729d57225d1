#include <algorithm>
#include <cstring>

#include "attention.h"
#include "parallel.h"

namespace trnc {
namespace {

// Writes one sequence's rows that fall into one page.
template <class T>
void write_page(const PagedKeys& keys, const Sequence& seq, const int32_t* table, int64_t block) {
  const int64_t d = keys.head_dim, size = keys.page_size;
  const int64_t begin = std::max<int64_t>(seq.start, block * size);
  const int64_t end = std::min<int64_t>(seq.start + seq.count, (block + 1) * size);
  for (int64_t head = 0; head < keys.kv_heads; ++head) {
    const int64_t page = (table[block] * keys.kv_heads + head) * d * size;
    T* k = static_cast<T*>(keys.k_pages) + page;
    T* v = static_cast<T*>(keys.v_pages) + page;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t slot = position - block * size;
      const int64_t row = ((seq.first + position - seq.start) * keys.kv_heads + head) * d;
      const T* key = static_cast<const T*>(keys.k_new) + row;
      for (int64_t i = 0; i < d; ++i) k[i * size + slot] = key[i];
      std::memcpy(v + slot * d, static_cast<const T*>(keys.v_new) + row, d * sizeof(T));
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

}  // namespace

void kv_write(const PagedKeys& keys) {
  if (keys.type == CacheType::f32) return write_pages<uint32_t>(keys);
  write_pages<uint16_t>(keys);
}

}  // namespace trnc
