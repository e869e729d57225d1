#include "bindings.h"
#include "sampling.h"

namespace trnc {
namespace {

void check_logits(const Tensor& logits) {
  check(logits, "logits", ScalarType::Float, 2);
  STD_TORCH_CHECK(logits.size(1) > 0, "logits: the vocabulary is empty");
}

// A contiguous [rows] tensor: one value for each row of logits.
void check_rows(const Tensor& tensor, const char* name, ScalarType dtype, int64_t rows) {
  check(tensor, name, dtype, 1);
  STD_TORCH_CHECK(tensor.size(0) == rows, name, ": expected ", rows, " elements, got ", tensor.size(0));
}

Tensor apply_mask_op(const Tensor& logits, const Tensor& mask) {
  check_logits(logits);
  check(mask, "mask", ScalarType::Int, 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1), words = (vocab + 31) / 32;
  STD_TORCH_CHECK(mask.size(0) == rows && mask.size(1) == words, "mask: expected ", rows, " rows of ", words,
                  " words for a vocabulary of ", vocab);
  Tensor out = empty({rows, vocab}, ScalarType::Float);
  apply_mask(read<float>(logits), read<int32_t>(mask), write<float>(out), rows, vocab);
  return out;
}

Tensor penalize_op(const Tensor& logits, const Tensor& ids, const Tensor& counts, const Tensor& repetition,
                   const Tensor& frequency, const Tensor& presence) {
  check_logits(logits);
  check(ids, "ids", ScalarType::Int, 2);
  check(counts, "counts", ScalarType::Int, 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1), entries = ids.size(1);
  STD_TORCH_CHECK(ids.size(0) == rows && counts.size(0) == rows && counts.size(1) == entries,
                  "ids, counts: expected one row for each of ", rows, " rows of logits, of equal width");
  check_rows(repetition, "repetition", ScalarType::Float, rows);
  check_rows(frequency, "frequency", ScalarType::Float, rows);
  check_rows(presence, "presence", ScalarType::Float, rows);
  const Penalties penalties{read<int32_t>(ids), read<int32_t>(counts), read<float>(repetition),
                            read<float>(frequency), read<float>(presence)};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = r * entries; i < (r + 1) * entries && penalties.ids[i] >= 0; ++i)
      STD_TORCH_CHECK(penalties.ids[i] < vocab, "ids: ", penalties.ids[i], " is not in a vocabulary of ", vocab);
  }
  Tensor out = empty({rows, vocab}, ScalarType::Float);
  penalize(read<float>(logits), penalties, write<float>(out), rows, vocab, entries);
  return out;
}

Tensor logit_bias_op(const Tensor& logits, const Tensor& ids, const Tensor& values) {
  check_logits(logits);
  check(ids, "ids", ScalarType::Int, 2);
  check(values, "values", ScalarType::Float, 2);
  const int64_t rows = logits.size(0), vocab = logits.size(1), entries = ids.size(1);
  STD_TORCH_CHECK(ids.size(0) == rows && values.size(0) == rows && values.size(1) == entries,
                  "ids, values: expected one row for each of ", rows, " rows of logits, of equal width");
  for (int64_t i = 0; i < rows * entries; ++i) {
    const int32_t id = read<int32_t>(ids)[i];
    STD_TORCH_CHECK(id < vocab, "ids: ", id, " is not in a vocabulary of ", vocab);
  }
  Tensor out = empty({rows, vocab}, ScalarType::Float);
  logit_bias(read<float>(logits), read<int32_t>(ids), read<float>(values), write<float>(out), rows, vocab, entries);
  return out;
}

Tensor sample_greedy_op(const Tensor& logits) {
  check_logits(logits);
  Tensor out = empty({logits.size(0)}, ScalarType::Long);
  sample_greedy(read<float>(logits), write<int64_t>(out), logits.size(0), logits.size(1));
  return out;
}

Tensor sample_op(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                 const Tensor& min_p, const Tensor& seed, const Tensor& output_index) {
  check_logits(logits);
  const int64_t rows = logits.size(0);
  check_rows(temperature, "temperature", ScalarType::Float, rows);
  check_rows(top_k, "top_k", ScalarType::Int, rows);
  check_rows(top_p, "top_p", ScalarType::Float, rows);
  check_rows(min_p, "min_p", ScalarType::Float, rows);
  check_rows(seed, "seed", ScalarType::Long, rows);
  check_rows(output_index, "output_index", ScalarType::Long, rows);
  const SamplingRows params{read<float>(temperature), read<int32_t>(top_k), read<float>(top_p),
                            read<float>(min_p), read<int64_t>(seed), read<int64_t>(output_index)};
  Tensor out = empty({rows}, ScalarType::Long);
  sample(read<float>(logits), params, write<int64_t>(out), rows, logits.size(1));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> logprobs_op(const Tensor& logits, const Tensor& chosen, int64_t top) {
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_rows(chosen, "chosen", ScalarType::Long, rows);
  STD_TORCH_CHECK(top >= 0 && top <= vocab, "top: ", top, " is not within 0..", vocab, ", the vocabulary");
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t id = read<int64_t>(chosen)[r];
    STD_TORCH_CHECK(id >= 0 && id < vocab, "chosen: ", id, " is not in a vocabulary of ", vocab);
  }
  Tensor picked = empty({rows}, ScalarType::Float);
  Tensor ids = empty({rows, top}, ScalarType::Int);
  Tensor values = empty({rows, top}, ScalarType::Float);
  logprobs(read<float>(logits), read<int64_t>(chosen), write<float>(picked), write<int32_t>(ids),
           write<float>(values), rows, vocab, top);
  return {picked, ids, values};
}

}  // namespace
}  // namespace trnc

STABLE_TORCH_LIBRARY_IMPL(trnc, CPU, m) {
  m.impl("apply_mask", TORCH_BOX(&trnc::apply_mask_op));
  m.impl("penalize", TORCH_BOX(&trnc::penalize_op));
  m.impl("logit_bias", TORCH_BOX(&trnc::logit_bias_op));
  m.impl("sample_greedy", TORCH_BOX(&trnc::sample_greedy_op));
  m.impl("sample", TORCH_BOX(&trnc::sample_op));
  m.impl("logprobs", TORCH_BOX(&trnc::logprobs_op));
}
