#include "bindings_paged.h"
#include "latent.h"

namespace trnc {
namespace {

PagedKeys paged_latents(const Tensor& pages, const Tensor& latent_new, const Tensor& block_tables, const Tensor& sequences) {
  const CacheType type = cache_type(pages);
  check(pages, "pages", pages.scalar_type(), 3);
  check(latent_new, "latent_new", pages.scalar_type(), 2);
  check(block_tables, "block_tables", ScalarType::Int, 2);
  check(sequences, "sequences", ScalarType::Int, 2);
  check_shape(latent_new, "latent_new", {latent_new.size(0), pages.size(2)});
  check_shape(sequences, "sequences", {block_tables.size(0), 3});
  // The kernel of attention reads the cache; only latent_write, whose schema says so, writes to it.
  PagedKeys keys{};
  keys.type = type;
  keys.v_pages = pages.mutable_data_ptr();
  keys.v_new = latent_new.const_data_ptr();
  keys.block_tables = read<int32_t>(block_tables);
  keys.sequences = reinterpret_cast<const Sequence*>(read<int32_t>(sequences));
  keys.num_sequences = block_tables.size(0);
  keys.table_width = block_tables.size(1);
  keys.kv_heads = 1;
  keys.row_size = pages.size(2);
  keys.head_dim = type == CacheType::i8 ? keys.row_size - 4 : keys.row_size;
  keys.page_size = pages.size(1);
  return keys;
}

Tensor latent_attention_op(const Tensor& q, const Tensor& latent_new, const Tensor& pages, const Tensor& block_tables,
                           const Tensor& sequences, double scale, int64_t rank) {
  const PagedKeys keys = paged_latents(pages, latent_new, block_tables, sequences);
  check(q, "q", ScalarType::Float, 3);
  check_shape(q, "q", {latent_new.size(0), q.size(1), keys.head_dim});
  STD_TORCH_CHECK(rank >= 1 && rank <= keys.head_dim, "rank ", rank, " is not within latents of ", keys.head_dim);
  check_sequences(keys, q.size(0), pages.size(0), false);
  Tensor out = empty({q.size(0), q.size(1), rank}, ScalarType::Float);
  latent_attention(keys, read<float>(q), write<float>(out), q.size(0), q.size(1), rank, static_cast<float>(scale));
  return out;
}

void latent_write_op(Tensor pages, const Tensor& latent_new, const Tensor& block_tables, const Tensor& sequences) {
  const PagedKeys keys = paged_latents(pages, latent_new, block_tables, sequences);
  check_sequences(keys, latent_new.size(0), pages.size(0), true);
  latent_write(keys);
}

}  // namespace
}  // namespace trnc

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("latent_attention", TORCH_BOX(&trnc::latent_attention_op));
  m.impl("latent_write", TORCH_BOX(&trnc::latent_write_op));
}
