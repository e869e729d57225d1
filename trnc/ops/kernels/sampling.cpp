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
#include <memory>
#include <utility>
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

// Some tokens of a row, by id: every one of at least some log weight.
struct Tokens {
  std::vector<float> log_weight, weight;
  std::vector<int32_t> id;

  int64_t size() const { return static_cast<int64_t>(id.size()); }
  void resize(int64_t n) { log_weight.resize(n), weight.resize(n), id.resize(n); }
};

void collect(const Weights& weights, const Maxima& maxima, float least, Tokens& out) {
  int64_t count = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(maxima.blocks.size()); ++b) {
    if (weights.log(maxima.blocks[b]) < least) continue;
    if (out.size() < count + kBlock) out.resize(2 * count + kBlock);
    const int64_t end = std::min(weights.row.size, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i += kLanes) {
      const F32x16 y = weights.log(i);
      Mask found = Mask(~less(y, broadcast(least))) & first_lanes(static_cast<int>(end - i));
      if (!found) continue;
      float log_weight[kLanes], weight[kLanes];
      store(log_weight, y);
      store(weight, exp(y));
      for (; found; found &= Mask(found - 1), ++count) {
        const int lane = std::countr_zero(found);
        out.log_weight[count] = log_weight[lane];
        out.weight[count] = weight[lane];
        out.id[count] = static_cast<int32_t>(i + lane);
      }
    }
  }
  out.resize(count);
}

// A place in the order of a row's tokens, best first: descending weight, then ascending id.
struct Place {
  float log_weight;
  int32_t id;

  bool operator<(const Place& other) const {
    return log_weight > other.log_weight || (log_weight == other.log_weight && id < other.id);
  }
};
constexpr Place kLast{-kInfinity, std::numeric_limits<int32_t>::max()};

// The sum of `measure` over the tokens of at least this log weight.
double measure_from(const Tokens& tokens, const std::vector<float>& measure, float log_weight) {
  const F32x16 zero = broadcast(0.0f), least = broadcast(log_weight);
  double total = 0;
  for (int64_t begin = 0; begin < tokens.size(); begin += kBlock) {
    const int64_t end = std::min(tokens.size(), begin + kBlock);
    F32x16 sum = zero;
    for (int64_t i = begin; i < end; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, end - i));
      const F32x16 y = load_n(tokens.log_weight.data() + i, n);
      sum = sum + select(less(y, least), zero, load_n(measure.data() + i, n));
    }
    total += reduce_add(sum);
  }
  return total;
}

// Where the shortest run of best tokens ends whose measures sum to `need` or more; it holds at least
// one token. Log weights are halved down to a narrow band that holds the end, and only the band is sorted.
Place end_of_run(const Tokens& tokens, const std::vector<float>& measure, double need,
                 std::vector<std::pair<Place, float>>& band) {
  float low = -1024.0f, high = 1.0f;  // noise spans less than 20, so no lighter token is ever picked
  while (tokens.size() > 4 * kLanes && high - low > 1e-4f) {
    const float middle = low + (high - low) / 2;
    (measure_from(tokens, measure, middle) < need ? high : low) = middle;
  }
  need -= measure_from(tokens, measure, high);
  band.clear();
  for (int64_t i = 0; i < tokens.size(); ++i) {
    const float y = tokens.log_weight[i];
    if (y >= low && y < high) band.push_back({{y, tokens.id[i]}, measure[i]});
  }
  std::sort(band.begin(), band.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [place, size] : band) {
    need -= size;
    if (need <= 0) return place;
  }
  return band.empty() ? kLast : band.back().first;
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

// Which of the tokens i.. with log weights y come after `last`.
Mask beyond(Place last, F32x16 y, int64_t i) {
  const Mask tied = equal(y, broadcast(last.log_weight));
  const Mask kept = first_lanes(static_cast<int>(std::clamp<int64_t>(last.id + 1 - i, 0, kLanes)));
  return less(y, broadcast(last.log_weight)) | Mask(tied & ~kept);
}

// The best of the tokens of one group of blocks that come no later than `last`.
Pick pick_in_group(const Weights& weights, const Maxima& maxima, int64_t group, Place last, float min_p,
                   uint64_t key) {
  const float most_noise = largest_noise();
  Pick pick;
  const int64_t blocks = std::min<int64_t>(maxima.blocks.size(), (group + 1) * kGroupBlocks);
  for (int64_t b = group * kGroupBlocks; b < blocks; ++b) {
    const float best = weights.log(maxima.blocks[b]);
    if (best < last.log_weight || best + most_noise < pick.score) continue;
    const int64_t end = std::min(weights.row.size, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i += kLanes) {
      const F32x16 y = weights.log(i);
      const Mask dropped = beyond(last, y, i) | (min_p > 0 ? less(exp(y), broadcast(min_p)) : 0);
      if (dropped == 0xffff) continue;
      int32_t bits[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) bits[lane] = noise_bits(key, i + lane);
      const F32x16 score = select(dropped, broadcast(-kInfinity), y + gumbel(bits));
      if (!less(broadcast(pick.score), score)) continue;
      const float largest = reduce_max(score);
      pick.offer(largest, i + std::countr_zero(equal(score, broadcast(largest))));
    }
  }
  return pick;
}

struct Scratch {
  Maxima maxima;
  std::vector<float> values;
  std::vector<double> sums;
  std::vector<Pick> picks;
  Tokens tokens;
  std::vector<std::pair<Place, float>> band;
  std::vector<Place> order;
};

Scratch& scratch() {
  thread_local const auto scratch = std::make_unique<Scratch>();  // its address is looked up once a call
  return *scratch;
}

// Drops the tokens that come after `last`.
void truncate(Tokens& tokens, Place last) {
  int64_t kept = 0;
  for (int64_t i = 0; i < tokens.size(); ++i) {
    if (last < Place{tokens.log_weight[i], tokens.id[i]}) continue;
    tokens.log_weight[kept] = tokens.log_weight[i];
    tokens.weight[kept] = tokens.weight[i];
    tokens.id[kept++] = tokens.id[i];
  }
  tokens.resize(kept);
}

// The last token that passes top_k and top_p.
Place last_kept(const Weights& weights, const SamplingRow& row, Scratch& s) {
  const bool few = row.top_k > 0 && row.top_k < weights.row.size;
  const double top_p = std::max(row.top_p, 0.0f);
  Place last = kLast;
  double total = 0;
  if (few) {
    collect(weights, s.maxima, weights.log(s.maxima.at_least(row.top_k, s.values)), s.tokens);
    s.values.assign(s.tokens.size(), 1.0f);
    last = end_of_run(s.tokens, s.values, row.top_k, s.band);
    if (!(top_p < 1)) return last;
    truncate(s.tokens, last);
    total = measure_from(s.tokens, s.tokens.weight, -kInfinity);
  } else if (top_p < 1) {
    // All tokens lighter than this weigh less than 1 - top_p together, so the run ends before them.
    total = weights.sum(s.sums);
    const double least = (1.0 - top_p) * total / static_cast<double>(weights.row.size);
    collect(weights, s.maxima, static_cast<float>(std::log(least)) - 1e-3f, s.tokens);
  } else {
    return last;
  }
  return end_of_run(s.tokens, s.tokens.weight, top_p * total, s.band);
}

int64_t sample_row(const Row& row, const SamplingRow& params, Scratch& s) {
  s.maxima.find(row);
  if (!(params.temperature > 0) || std::isinf(s.maxima.top)) return first_largest(row, s.maxima);
  const Weights weights{row, s.maxima.top, params.temperature};
  const Place last = last_kept(weights, params, s);
  const float min_p = std::min(params.min_p, 1.0f);
  const uint64_t key = noise_key(params);
  s.picks.assign(ceil_div(row.size, kGroup), {});
  parallel_for(static_cast<int64_t>(s.picks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) s.picks[g] = pick_in_group(weights, s.maxima, g, last, min_p, key);
  });
  Pick best;
  for (const Pick& pick : s.picks) best.offer(pick.score, pick.id);
  return best.id;
}

}  // namespace

void apply_mask(const float* logits, const int32_t* mask, float* out, int64_t rows, int64_t vocab) {
  const int64_t words = ceil_div(vocab, 32);
  const F32x16 nothing = broadcast(-kInfinity);
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < vocab; i += kLanes) {
        const auto word = static_cast<uint32_t>(mask[r * words + i / 32]);
        const Mask allowed = static_cast<Mask>(word >> (i % 32));
        const int n = static_cast<int>(std::min<int64_t>(kLanes, vocab - i));
        store_n(out + r * vocab + i, select(allowed, load_n(logits + r * vocab + i, n), nothing), n);
      }
    }
  });
}

void penalize(const float* logits, const Penalties& p, float* out, int64_t rows, int64_t vocab, int64_t entries) {
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = out + r * vocab;
      std::memcpy(row, logits + r * vocab, vocab * sizeof(float));
      for (int64_t i = r * entries; i < (r + 1) * entries && p.ids[i] >= 0; ++i) {
        float& logit = row[p.ids[i]];
        logit = logit > 0 ? logit / p.repetition[r] : logit * p.repetition[r];
        logit -= p.frequency[r] * static_cast<float>(p.counts[i]);
        if (p.counts[i] > 0) logit -= p.presence[r];
      }
    }
  });
}

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
      collect(weights, s.maxima, weights.log(s.maxima.at_least(top, s.values)), s.tokens);
      s.order.clear();
      for (int64_t i = 0; i < s.tokens.size(); ++i) s.order.push_back({s.tokens.log_weight[i], s.tokens.id[i]});
      std::partial_sort(s.order.begin(), s.order.begin() + top, s.order.end());
      for (int64_t i = 0; i < top; ++i) {
        top_ids[r * top + i] = s.order[i].id;
        top_logprobs[r * top + i] = s.order[i].log_weight - log_sum;
      }
    }
  });
}

}  // namespace trnc
