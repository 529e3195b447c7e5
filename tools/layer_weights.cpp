// SPDX-License-Identifier: Apache-2.0
#include "layer_weights.hpp"

#include <utility>

namespace distmoe::tools {

LayerWeights::LayerWeights(LoadedExperts experts, Precision precision, bool inference)
    : experts_(std::move(experts)) {
  if (precision == Precision::kBF16) return;
  const BlockScaledConfig config{.format = precision, .inference = inference};
  const ExpertWeights loaded = experts_.view();
  w13_ = prepare_block_scaled_weight(loaded.w13_L2FD, config);
  experts_.w13 = {};
  w2_ = prepare_block_scaled_weight(loaded.w2_LDF, config);
  experts_.w2 = {};
}

ExpertWeights LayerWeights::view() const {
  ExpertWeights weights = experts_.view();
  if (!w13_.view().is_given()) return weights;
  weights.w13_L2FD = weights.w2_LDF = {};
  weights.prepared_w13 = w13_.view();
  weights.prepared_w2 = w2_.view();
  return weights;
}

std::int64_t LayerWeights::num_bytes() const {
  return static_cast<std::int64_t>(experts_.w13.num_bytes() + experts_.w2.num_bytes() +
                                   experts_.bias13.num_bytes() + experts_.bias2.num_bytes() +
                                   w13_.num_bytes() + w2_.num_bytes());
}

}  // namespace distmoe::tools
