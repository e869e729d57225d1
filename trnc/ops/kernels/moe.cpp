// Experts run one after the other on the rows that chose them, so each one's weights are read once a step. Their linear
// layers give a row the same bits in any company, and a row's results are added up in the order of its ids.
#include "moe.h"

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace trnc {
namespace {

constexpr int64_t kGrain = 16384;  // elements that are worth waking a thread for

int64_t rows_per_span(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

// The index of the largest of `x` that is not taken, the first of equals; some index where there are NaN.
int64_t take_best(const float* x, int64_t n, uint8_t* taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  }
  taken[best] = 1;
  return best;
}

// The sum of the two largest of `x`, n >= 2.
float sum_of_two(const float* x, int64_t n) {
  float first = std::max(x[0], x[1]), second = std::min(x[0], x[1]);
  for (int64_t i = 2; i < n; ++i) {
    if (x[i] > first) second = first, first = x[i];
    else if (x[i] > second) second = x[i];
  }
  return first + second;
}

struct RouteScratch {
  std::vector<float> scores, choice, group_scores;
  std::vector<uint8_t> taken, group_taken;

  explicit RouteScratch(const Route& op)
      : scores(op.experts), choice(op.experts), group_scores(op.groups), taken(op.experts), group_taken(op.groups) {}
};

void score_row(const Route& op, int64_t row, RouteScratch& s) {
  const F32x16 one = broadcast(1.0f), zero = broadcast(0.0f);
  for (int64_t i = 0; i < op.experts; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, op.experts - i));
    const F32x16 score = one / (one + exp(zero - load_n(op.logits + row * op.experts + i, n)));
    store_n(s.scores.data() + i, score, n);
    store_n(s.choice.data() + i, score + load_n(op.correction + i, n), n);
  }
}

// Marks the experts of all but the best groups as taken.
void close_groups(const Route& op, RouteScratch& s) {
  const int64_t size = op.experts / op.groups;
  for (int64_t group = 0; group < op.groups; ++group) s.group_scores[group] = sum_of_two(&s.choice[group * size], size);
  std::fill(s.taken.begin(), s.taken.end(), uint8_t{1});
  std::fill(s.group_taken.begin(), s.group_taken.end(), uint8_t{0});
  for (int64_t i = 0; i < op.top_groups; ++i) {
    const int64_t group = take_best(s.group_scores.data(), op.groups, s.group_taken.data());
    std::fill_n(s.taken.begin() + group * size, size, uint8_t{0});
  }
}

void route_row(const Route& op, int64_t row, RouteScratch& s) {
  score_row(op, row, s);
  close_groups(op, s);
  float* const weights = op.weights + row * op.top_k;
  float sum = 0.0f;
  for (int64_t i = 0; i < op.top_k; ++i) {
    const int64_t expert = take_best(s.choice.data(), op.experts, s.taken.data());
    op.ids[row * op.top_k + i] = static_cast<int32_t>(expert);
    weights[i] = s.scores[expert];
    sum += weights[i];
  }
  for (int64_t i = 0; i < op.top_k; ++i) weights[i] = (op.normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * op.scale;
}

// Which rows chose each expert: expert e has places first[e]..first[e + 1] - 1, and place p is choice `choice[p]`,
// row * top_k + j. `place` is the inverse.
struct Groups {
  std::vector<int64_t> first, choice, place;
};

void group_by_expert(const Experts& op, Groups& groups) {
  const int64_t choices = op.rows * op.top_k;
  groups.first.assign(op.experts + 1, 0);
  groups.choice.resize(choices);
  groups.place.resize(choices);
  for (int64_t i = 0; i < choices; ++i) ++groups.first[op.ids[i] + 1];
  for (int64_t e = 0; e < op.experts; ++e) groups.first[e + 1] += groups.first[e];
  std::vector<int64_t> next(groups.first.begin(), groups.first.end() - 1);
  for (int64_t i = 0; i < choices; ++i) {
    groups.place[i] = next[op.ids[i]]++;
    groups.choice[groups.place[i]] = i;
  }
}

void add_results(const Experts& op, const Groups& groups, const float* results) {
  parallel_for(op.rows, rows_per_span(op.hidden * op.top_k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < op.hidden; i += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, op.hidden - i));
        F32x16 sum = broadcast(0.0f);
        for (int64_t c = row * op.top_k; c < (row + 1) * op.top_k; ++c) {
          sum = fma(broadcast(op.weights[c]), load_n(results + groups.place[c] * op.hidden + i, n), sum);
        }
        store_n(op.out + row * op.hidden + i, sum, n);
      }
    }
  });
}

}  // namespace

void route(const Route& op) {
  parallel_for(op.rows, rows_per_span(op.experts * op.top_k), [&op](int64_t begin, int64_t end) {
    RouteScratch scratch(op);
    for (int64_t row = begin; row < end; ++row) route_row(op, row, scratch);
  });
}

void experts(const Experts& op) {
  static thread_local Groups groups;
  static thread_local std::vector<float> gathered, inner, results;
  group_by_expert(op, groups);
  results.resize(op.rows * op.top_k * op.hidden);
  const int64_t gate_up_bytes = (2 * op.inner + kTileWidth - 1) / kTileWidth * tile_bytes(op.gate_up_format, op.hidden);
  const int64_t down_bytes = (op.hidden + kTileWidth - 1) / kTileWidth * tile_bytes(op.down_format, op.inner);
  for (int64_t expert = 0; expert < op.experts; ++expert) {
    const int64_t first = groups.first[expert], rows = groups.first[expert + 1] - first;
    if (rows == 0) continue;
    gathered.resize(rows * op.hidden);
    inner.resize(rows * op.inner);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(op.x + groups.choice[first + i] / op.top_k * op.hidden, op.hidden, gathered.data() + i * op.hidden);
    }
    Linear gate_up{gathered.data(), op.gate_up + expert * gate_up_bytes, inner.data(), rows, op.hidden, 2 * op.inner};
    gate_up.gated = true;
    linear(gate_up, op.gate_up_format);
    linear({inner.data(), op.down + expert * down_bytes, results.data() + first * op.hidden, rows, op.inner, op.hidden},
           op.down_format);
  }
  add_results(op, groups, results.data());
}

void head_linear(const HeadLinear& op) {
  const int64_t k = op.in_features, n = op.out_features;
  const int64_t bytes = (n + kTileWidth - 1) / kTileWidth * tile_bytes(op.format, k);
  parallel_for(op.heads, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> x, out;
    x.resize(op.rows * k);
    out.resize(op.rows * n);
    for (int64_t head = begin; head < end; ++head) {
      for (int64_t row = 0; row < op.rows; ++row) std::copy_n(op.x + (row * op.heads + head) * k, k, x.data() + row * k);
      linear({x.data(), op.weight + head * bytes, out.data(), op.rows, k, n}, op.format);
      for (int64_t row = 0; row < op.rows; ++row) {
        std::copy_n(out.data() + row * n, n, op.out + (row * op.heads + head) * n);
      }
    }
  });
}

}  // namespace trnc
