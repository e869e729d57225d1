// Each row is read once for the maxima of its blocks of kBlock logits. They then say where to look: the
// largest logit is in the first block that has it, the n-th largest logit is at least the n-th largest
// maximum, and a block whose maximum cannot win needs no noise. Blocks form groups, over which threads
// share the work of a row; a group's sums are taken in one order, and groups are combined in order, so
// the result does not depend on threads.
#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace trnc {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 256;
constexpr int64_t kGroupBlocks = 16;
constexpr int64_t kGroup = kBlock * kGroupBlocks;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row of logits; NaN reads as -infinity, and so do lanes after its end.
struct Row {
  const float* logits;
  int64_t size;

  F32x16 at(int64_t i) const {
    const F32x16 nothing = broadcast(-kInfinity);
    if (i + kLanes <= size) return max(load(logits + i), nothing);
    const int n = static_cast<int>(size - i);
    return max(select(first_lanes(n), load_n(logits + i, n), nothing), nothing);
  }
  float largest(int64_t begin, int64_t end) const {
    F32x16 a = broadcast(-kInfinity), b = a;
    for (int64_t i = begin; i < end; i += 2 * kLanes) {
      a = max(at(i), a);
      if (i + kLanes < end) b = max(at(i + kLanes), b);
    }
    return reduce_max(max(a, b));
  }
};

// The maxima of a row's blocks, and of the row.
struct Maxima {
  std::vector<float> blocks;
  float top;

  void find(const Row& row) {
    blocks.resize(ceil_div(row.size, kBlock));
    parallel_for(static_cast<int64_t>(blocks.size()), kGroupBlocks, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        blocks[b] = row.largest(b * kBlock, std::min(row.size, (b + 1) * kBlock));
    });
    top = *std::max_element(blocks.begin(), blocks.end());
  }

  // A value that at least n logits reach.
  float at_least(int64_t n, std::vector<float>& scratch) const {
    if (n > static_cast<int64_t>(blocks.size())) return -kInfinity;
    scratch = blocks;
    std::nth_element(scratch.begin(), scratch.begin() + (n - 1), scratch.end(), std::greater<>());
    return scratch[n - 1];
  }
};

int64_t first_largest(const Row& row, const Maxima& maxima) {
  if (maxima.top == -kInfinity) return 0;
  const auto block = std::find(maxima.blocks.begin(), maxima.blocks.end(), maxima.top);
  for (int64_t i = (block - maxima.blocks.begin()) * kBlock;; i += kLanes) {
    if (const Mask found = equal(row.at(i), broadcast(maxima.top))) return i + std::countr_zero(found);
  }
}

// The log weights of a row's tokens, at most 0: (logit - largest) / temperature.
struct Weights {
  const Row& row;
  float top, temperature;

  F32x16 log(int64_t i) const {
    const F32x16 y = (row.at(i) - broadcast(top)) / broadcast(temperature);
    return max(y, broadcast(-kInfinity));  // never NaN, which no order has a place for
  }
  float log(float logit) const { return (logit - top) / temperature; }

  double sum(std::vector<double>& groups) const {
    groups.resize(ceil_div(row.size, kGroup));
    parallel_for(static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) groups[g] = sum_group(g);
    });
    double total = 0;
    for (const double group : groups) total += group;
    return total;
  }
  float sum_group(int64_t group) const {
    F32x16 a = broadcast(0.0f), b = a;
    const int64_t end = std::min(row.size, (group + 1) * kGroup);
    for (int64_t i = group * kGroup; i < end; i += 2 * kLanes) {
      a = a + exp(log(i));
      if (i + kLanes < end) b = b + exp(log(i + kLanes));
    }
    return reduce_add(a + b);
  }
};

struct Candidate {
  float log_weight, weight;
  int32_t id;
};

bool better(const Candidate& a, const Candidate& b) {
  return a.log_weight > b.log_weight || (a.log_weight == b.log_weight && a.id < b.id);
}

// The tokens of at least this log weight, by id.
void collect(const Weights& weights, const Maxima& maxima, float least, std::vector<Candidate>& out) {
  out.clear();
  for (int64_t b = 0; b < static_cast<int64_t>(maxima.blocks.size()); ++b) {
    if (weights.log(maxima.blocks[b]) < least) continue;
    const int64_t end = std::min(weights.row.size, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i += kLanes) {
      const F32x16 y = weights.log(i);
      Mask found = Mask(~less(y, broadcast(least))) & first_lanes(static_cast<int>(end - i));
      if (!found) continue;
      float log_weight[kLanes], weight[kLanes];
      store(log_weight, y);
      store(weight, exp(y));
      for (; found; found &= Mask(found - 1)) {
        const int lane = std::countr_zero(found);
        out.push_back({log_weight[lane], weight[lane], static_cast<int32_t>(i + lane)});
      }
    }
  }
}

double total_weight(const Candidate* begin, const Candidate* end) {
  double total = 0;
  for (; begin != end; ++begin) total += begin->weight;
  return total;
}

// Moves the shortest run of best candidates that weighs `need` or more to the front and returns its
// length, at least 1. Quickselect by weight: only the half that holds the run's end is looked into.
int64_t nucleus(std::vector<Candidate>& candidates, double need) {
  int64_t begin = 0, end = static_cast<int64_t>(candidates.size());
  Candidate* const c = candidates.data();
  while (end - begin > 2 * kLanes) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(c + begin, c + middle, c + end, better);
    const double weight = total_weight(c + begin, c + middle);
    if (weight >= need) {
      end = middle;
    } else {
      need -= weight;
      begin = middle;
    }
  }
  std::sort(c + begin, c + end, better);
  while (begin < end && (need > 0 || begin == 0)) need -= c[begin++].weight;
  return begin;
}

// splitmix64's finaliser and increment.
uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

uint64_t noise_key(const SamplingRow& row) {
  return mix(mix(static_cast<uint64_t>(row.seed)) + static_cast<uint64_t>(row.output_index) * kGamma);
}

// The top 23 bits of token `id`'s hash.
int32_t noise_bits(uint64_t key, uint64_t id) { return static_cast<int32_t>(mix(key + (id + 1) * kGamma) >> 41); }

F32x16 gumbel(const int32_t* bits) {
  const F32x16 u = (to_float(load(bits)) + broadcast(0.5f)) * broadcast(0x1p-23f);
  const F32x16 zero = broadcast(0.0f);
  return zero - log(zero - log(u));
}

float largest_noise() {
  int32_t bits[kLanes];
  std::fill_n(bits, kLanes, (1 << 23) - 1);
  return first_lane(gumbel(bits));
}

struct Pick {
  float score = -kInfinity;
  int64_t id = 0;

  void offer(float other, int64_t other_id) {
    if (other > score || (other == score && other_id < id)) score = other, id = other_id;
  }
};

Pick pick_candidate(const std::vector<Candidate>& candidates, int64_t count, float min_p, uint64_t key) {
  Pick pick;
  for (int64_t at = 0; at < count; at += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, count - at);
    int32_t bits[kLanes] = {};
    float noise[kLanes];
    for (int64_t i = 0; i < n; ++i) bits[i] = noise_bits(key, candidates[at + i].id);
    store(noise, gumbel(bits));
    for (int64_t i = 0; i < n; ++i) {
      const Candidate& c = candidates[at + i];
      if (!(c.weight < min_p)) pick.offer(c.log_weight + noise[i], c.id);
    }
  }
  return pick;
}

// The best of the tokens of one group of blocks.
Pick pick_in_group(const Weights& weights, const Maxima& maxima, int64_t group, float min_p, uint64_t key) {
  const float most_noise = largest_noise();
  Pick pick;
  const int64_t last = std::min<int64_t>(maxima.blocks.size(), (group + 1) * kGroupBlocks);
  for (int64_t b = group * kGroupBlocks; b < last; ++b) {
    if (weights.log(maxima.blocks[b]) + most_noise < pick.score) continue;
    const int64_t end = std::min(weights.row.size, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i += kLanes) {
      int32_t bits[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) bits[lane] = noise_bits(key, i + lane);
      const F32x16 y = weights.log(i);
      F32x16 score = y + gumbel(bits);
      if (min_p > 0) score = select(less(exp(y), broadcast(min_p)), broadcast(-kInfinity), score);
      if (!less(broadcast(pick.score), score)) continue;
      const float best = reduce_max(score);
      pick.offer(best, i + std::countr_zero(equal(score, broadcast(best))));
    }
  }
  return pick;
}

struct Scratch {
  Maxima maxima;
  std::vector<float> values;
  std::vector<double> sums;
  std::vector<Pick> picks;
  std::vector<Candidate> candidates;
};

Scratch& scratch() {
  thread_local Scratch scratch;
  return scratch;
}

int64_t pick_from_all(const Weights& weights, float min_p, uint64_t key, Scratch& s) {
  s.picks.assign(ceil_div(weights.row.size, kGroup), {});
  parallel_for(static_cast<int64_t>(s.picks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) s.picks[g] = pick_in_group(weights, s.maxima, g, min_p, key);
  });
  Pick best;
  for (const Pick& pick : s.picks) best.offer(pick.score, pick.id);
  return best.id;
}

// Leaves the tokens that pass top_k and top_p at the front of s.candidates; returns how many.
int64_t filter(const Weights& weights, const SamplingRow& row, Scratch& s) {
  const double top_p = std::max(row.top_p, 0.0f);
  double total = 0;
  if (row.top_k > 0 && row.top_k < weights.row.size) {
    collect(weights, s.maxima, weights.log(s.maxima.at_least(row.top_k, s.values)), s.candidates);
    if (row.top_k < static_cast<int64_t>(s.candidates.size())) {
      std::nth_element(s.candidates.begin(), s.candidates.begin() + row.top_k, s.candidates.end(), better);
      s.candidates.resize(row.top_k);
    }
    if (!(top_p < 1)) return static_cast<int64_t>(s.candidates.size());
    total = total_weight(s.candidates.data(), s.candidates.data() + s.candidates.size());
  } else {
    // All tokens lighter than this weigh less than 1 - top_p together, so the nucleus ends before them.
    total = weights.sum(s.sums);
    const double least = (1.0 - top_p) * total / static_cast<double>(weights.row.size);
    collect(weights, s.maxima, static_cast<float>(std::log(least)) - 1e-3f, s.candidates);
  }
  return nucleus(s.candidates, top_p * total);
}

int64_t sample_row(const Row& row, const SamplingRow& params, Scratch& s) {
  s.maxima.find(row);
  if (!(params.temperature > 0) || std::isinf(s.maxima.top)) return first_largest(row, s.maxima);
  const Weights weights{row, s.maxima.top, params.temperature};
  const float min_p = std::min(params.min_p, 1.0f);
  const uint64_t key = noise_key(params);
  const bool all = (params.top_k <= 0 || params.top_k >= row.size) && !(params.top_p < 1);
  if (all) return pick_from_all(weights, min_p, key, s);
  const int64_t count = filter(weights, params, s);
  return pick_candidate(s.candidates, count, min_p, key).id;
}

}  // namespace

void logit_bias(const float* logits, const int32_t* ids, const float* values, float* out, int64_t rows,
                int64_t vocab, int64_t entries) {
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(out + r * vocab, logits + r * vocab, vocab * sizeof(float));
      for (int64_t i = r * entries; i < (r + 1) * entries; ++i) {
        if (ids[i] >= 0) out[r * vocab + ids[i]] += values[i];
      }
    }
  });
}

void sample_greedy(const float* logits, int64_t* out, int64_t rows, int64_t vocab) {
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Row row{logits + r * vocab, vocab};
      scratch().maxima.find(row);
      out[r] = first_largest(row, scratch().maxima);
    }
  });
}

void sample(const float* logits, const SamplingRows& params, int64_t* out, int64_t rows, int64_t vocab) {
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      out[r] = sample_row(Row{logits + r * vocab, vocab}, params.row(r), scratch());
  });
}

void logprobs(const float* logits, const int64_t* chosen, float* chosen_logprob, int32_t* top_ids,
              float* top_logprobs, int64_t rows, int64_t vocab, int64_t top) {
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    Scratch& s = scratch();
    for (int64_t r = begin; r < end; ++r) {
      const Row row{logits + r * vocab, vocab};
      s.maxima.find(row);
      const Weights weights{row, s.maxima.top, 1.0f};
      const float log_sum = static_cast<float>(std::log(weights.sum(s.sums)));
      const float logit = row.logits[chosen[r]];
      chosen_logprob[r] = weights.log(std::isnan(logit) ? -kInfinity : logit) - log_sum;
      if (top == 0) continue;
      collect(weights, s.maxima, weights.log(s.maxima.at_least(top, s.values)), s.candidates);
      std::partial_sort(s.candidates.begin(), s.candidates.begin() + top, s.candidates.end(), better);
      for (int64_t i = 0; i < top; ++i) {
        top_ids[r * top + i] = s.candidates[i].id;
        top_logprobs[r * top + i] = s.candidates[i].log_weight - log_sum;
      }
    }
  });
}

}  // namespace trnc
