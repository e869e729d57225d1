#include "bindings_paged.h"

namespace trnc {
namespace {

PagedKeys paged_keys(const Tensor& k_pages, const Tensor& v_pages, const Tensor& k_new, const Tensor& v_new,
                     const Tensor& block_tables, const Tensor& sequences) {
  const CacheType type = cache_type(k_pages);
  check(k_pages, "k_pages", k_pages.scalar_type(), 4);
  check(v_pages, "v_pages", k_pages.scalar_type(), 4);
  check(k_new, "k_new", k_pages.scalar_type(), 3);
  check(v_new, "v_new", k_pages.scalar_type(), 3);
  check(block_tables, "block_tables", ScalarType::Int, 2);
  check(sequences, "sequences", ScalarType::Int, 2);
  const int64_t heads = k_pages.size(1), width = k_pages.size(2), page_size = k_pages.size(3);
  check_shape(v_pages, "v_pages", {k_pages.size(0), heads, page_size, width});
  check_shape(k_new, "k_new", {k_new.size(0), heads, width});
  check_shape(v_new, "v_new", {k_new.size(0), heads, width});
  check_shape(sequences, "sequences", {block_tables.size(0), 3});
  STD_TORCH_CHECK(page_size % 16 == 0 && kSegmentKeys % page_size == 0,
                  "k_pages: the page size must be 16, 32, 64, 128 or 256, got ", page_size);
  STD_TORCH_CHECK(type != CacheType::i8 || width % 4 == 0,
                  "k_pages: the head dimension of a cache of i8 must be a multiple of 4, got ", width - 4);
  // The kernels read the cache; only kv_write, whose schema says so, writes to it.
  return {type, k_pages.mutable_data_ptr(), v_pages.mutable_data_ptr(), k_new.const_data_ptr(),
          v_new.const_data_ptr(), read<int32_t>(block_tables),
          reinterpret_cast<const Sequence*>(read<int32_t>(sequences)), block_tables.size(0),
          block_tables.size(1), heads, type == CacheType::i8 ? width - 4 : width, width, page_size};
}

Tensor paged_attention_op(const Tensor& q, const Tensor& k_new, const Tensor& v_new, const Tensor& k_pages,
                          const Tensor& v_pages, const Tensor& block_tables, const Tensor& sequences,
                          double scale) {
  const PagedKeys keys = paged_keys(k_pages, v_pages, k_new, v_new, block_tables, sequences);
  check(q, "q", ScalarType::Float, 3);
  check_shape(q, "q", {k_new.size(0), q.size(1), keys.head_dim});
  STD_TORCH_CHECK(q.size(1) % keys.kv_heads == 0, "q: ", q.size(1), " heads do not divide into groups of ",
                  keys.kv_heads, " key-value heads");
  check_sequences(keys, q.size(0), k_pages.size(0), false);
  Tensor out = empty({q.size(0), q.size(1), keys.head_dim}, ScalarType::Float);
  paged_attention(keys, read<float>(q), write<float>(out), q.size(0), q.size(1), static_cast<float>(scale));
  return out;
}

Tensor quantize_kv_op(const Tensor& x) {
  check(x, "quantize_kv: x", ScalarType::Float, 3);
  Tensor out = empty({x.size(0), x.size(1), x.size(2) + 4}, ScalarType::Char);
  quantize_kv(read<float>(x), write<int8_t>(out), x.size(0) * x.size(1), x.size(2));
  return out;
}

void kv_write_op(Tensor k_pages, Tensor v_pages, const Tensor& k_new, const Tensor& v_new,
                 const Tensor& block_tables, const Tensor& sequences) {
  const PagedKeys keys = paged_keys(k_pages, v_pages, k_new, v_new, block_tables, sequences);
  check_sequences(keys, k_new.size(0), k_pages.size(0), true);
  kv_write(keys);
}

}  // namespace
}  // namespace trnc

TRNC_SHIM aoti_torch_cpu_paged_attention(AtenTensorHandle q, AtenTensorHandle k_new, AtenTensorHandle v_new,
                                         AtenTensorHandle k_pages, AtenTensorHandle v_pages,
                                         AtenTensorHandle block_tables, AtenTensorHandle sequences, double scale,
                                         AtenTensorHandle* result) {
  using trnc::borrow;
  return trnc::give(result, [=] {
    return trnc::paged_attention_op(borrow(q), borrow(k_new), borrow(v_new), borrow(k_pages), borrow(v_pages),
                                    borrow(block_tables), borrow(sequences), scale);
  });
}

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&trnc::paged_attention_op));
  m.impl("kv_write", TORCH_BOX(&trnc::kv_write_op));
  m.impl("quantize_kv", TORCH_BOX(&trnc::quantize_kv_op));
}
