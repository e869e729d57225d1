// Paged attention and the write of new keys and values, for CPUs. Shapes are those of
// trnc/ops/attention.py; the caller has checked them, and that tables name pages that exist.
#pragma once

#include <cstdint>

namespace trnc {

enum class CacheType { f32, f16, bf16, i8 };

// Keys that share one softmax. Longer contexts are merged from segments of this many keys, cut at
// multiples of it by absolute position, so that threads can share one sequence. Part of the bits.
constexpr int64_t kSegmentKeys = 256;

struct Sequence {
  int32_t first, count, start;
};

// The paged cache and the step's own rows. A row of i8 ends with its scale, an f32 in four elements. Page size must
// divide kSegmentKeys, and 16 divide it; with i8, head_dim is a multiple of four.
struct PagedKeys {
  CacheType type;
  void* k_pages;
  void* v_pages;
  const void* k_new;
  const void* v_new;
  const int32_t* block_tables;
  const Sequence* sequences;
  int64_t num_sequences, table_width;
  int64_t kv_heads, head_dim, row_size, page_size;  // row_size: elements of a stored row
};

// Writes out [tokens, query_heads, head_dim]; rows of no sequence become zeros.
void paged_attention(const PagedKeys& keys, const float* q, float* out, int64_t tokens, int64_t query_heads,
                     float scale);

void kv_write(const PagedKeys& keys);

// Rounds `rows` rows of f32 [width] to rows of i8 [width + 4].
void quantize_kv(const float* x, int8_t* out, int64_t rows, int64_t width);

}  // namespace trnc
