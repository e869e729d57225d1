// Routing and experts on plain pointers. Shapes are those of trnc/ops/moe.py; every row's bits depend on that row alone.
#pragma once

#include "kernels.h"

namespace trnc {

struct Route {
  const float* logits;      // [rows, experts]
  const float* correction;  // [experts]
  int32_t* ids;             // [rows, top_k]
  float* weights;           // [rows, top_k]
  int64_t rows, experts, groups, top_groups, top_k;
  bool normalize;
  float scale;
};

// Weights of all experts lie one after the other.
struct Experts {
  const float* x;        // [rows, hidden]
  const int32_t* ids;    // [rows, top_k], of experts that exist
  const float* weights;  // [rows, top_k]
  const uint8_t* gate_up;
  const uint8_t* down;
  float* out;  // [rows, hidden]
  Format gate_up_format, down_format;
  int64_t rows, top_k, experts, hidden, inner;
};

struct HeadLinear {
  const float* x;  // [rows, heads, in_features]
  const uint8_t* weight;
  float* out;  // [rows, heads, out_features]
  Format format;
  int64_t rows, heads, in_features, out_features;
};

void route(const Route& op);
void experts(const Experts& op);
void head_linear(const HeadLinear& op);

}  // namespace trnc
