// What bindings of paged attention share.
#pragma once

#include "attention.h"
#include "bindings.h"

namespace trnc {

inline CacheType cache_type(const Tensor& pages) {
  switch (pages.scalar_type()) {
    case ScalarType::Float: return CacheType::f32;
    case ScalarType::Half: return CacheType::f16;
    case ScalarType::BFloat16: return CacheType::bf16;
    case ScalarType::Char: return CacheType::i8;
    default: STD_TORCH_CHECK(false, "k_pages: expected f32, f16, bf16 or i8, got ", pages.scalar_type());
  }
}

inline void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  int64_t dim = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(tensor.size(dim) == size, name, ": expected size ", size, " in dimension ", dim, ", got ",
                    tensor.size(dim));
    ++dim;
  }
}

// Throws unless every sequence's rows exist and its table names existing pages for positions 0..end - 1,
// where end is its start (`own` false) or the end of its own rows (`own` true).
inline void check_sequences(const PagedKeys& keys, int64_t tokens, int64_t pages, bool own) {
  for (int64_t i = 0; i < keys.num_sequences; ++i) {
    const Sequence& seq = keys.sequences[i];
    if (seq.count == 0) continue;
    STD_TORCH_CHECK(seq.count > 0 && seq.first >= 0 && seq.start >= 0 && seq.count <= tokens - seq.first,
                    "sequences: row ", i, " = (", seq.first, ", ", seq.count, ", ", seq.start,
                    ") is not within ", tokens, " token rows");
    const int64_t end = static_cast<int64_t>(seq.start) + (own ? seq.count : 0);
    const int64_t blocks = (end + keys.page_size - 1) / keys.page_size;
    STD_TORCH_CHECK(blocks <= keys.table_width, "block_tables: sequence ", i, " needs ", blocks,
                    " pages, the table has ", keys.table_width);
    for (int64_t block = 0; block < blocks; ++block) {
      const int32_t page = keys.block_tables[i * keys.table_width + block];
      STD_TORCH_CHECK(page >= 0 && page < pages, "block_tables: sequence ", i, " names page ", page, " of ", pages);
    }
  }
}

}  // namespace trnc
