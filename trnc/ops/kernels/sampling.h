// From logits to tokens, for CPUs. Meanings, orders and ties are those of trnc/ops/sampling.py; the
// caller has checked shapes, that ids are below `vocab` and that `vocab` is at least 1.
#pragma once

#include <cstdint>

namespace trnc {

struct SamplingRow {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  int64_t seed, output_index;
};

struct SamplingRows {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* output_index;

  SamplingRow row(int64_t r) const {
    return {temperature[r], top_k[r], top_p[r], min_p[r], seed[r], output_index[r]};
  }
};

// mask [rows, ceil(vocab / 32)].
void apply_mask(const float* logits, const int32_t* mask, float* out, int64_t rows, int64_t vocab);

struct Penalties {
  const int32_t* ids;  // [rows, entries], as `counts`
  const int32_t* counts;
  const float* repetition;
  const float* frequency;
  const float* presence;
};

void penalize(const float* logits, const Penalties& penalties, float* out, int64_t rows, int64_t vocab,
              int64_t entries);
void logit_bias(const float* logits, const int32_t* ids, const float* values, float* out, int64_t rows,
                int64_t vocab, int64_t entries);
void sample_greedy(const float* logits, int64_t* out, int64_t rows, int64_t vocab);
void sample(const float* logits, const SamplingRows& params, int64_t* out, int64_t rows, int64_t vocab);

// chosen_logprob [rows], top_ids and top_logprobs [rows, top]; 0 <= top <= vocab.
void logprobs(const float* logits, const int64_t* chosen, float* chosen_logprob, int32_t* top_ids,
              float* top_logprobs, int64_t rows, int64_t vocab, int64_t top);

}  // namespace trnc
