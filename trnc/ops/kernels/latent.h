// Paged attention over latents and their write, for CPUs. Shapes are those of trnc/ops/latent.py; the caller has checked
// them, and that tables name pages that exist.
#pragma once

#include "attention.h"

namespace trnc {

// `keys` has one head of the latents' width, their pages in `v_pages` and the step's own in `v_new`; k_* are not used.
// Writes out [tokens, query_heads, rank]; rows of no sequence become zeros.
void latent_attention(const PagedKeys& keys, const float* q, float* out, int64_t tokens, int64_t query_heads, int64_t rank,
                      float scale);

void latent_write(const PagedKeys& keys);

}  // namespace trnc
