// SPDX-License-Identifier: Apache-2.0
//
// A context is made once and kept: a call on a temporary would plan, allocate and synchronise the
// ranks for every layer.
#include "distmoe/routed_experts.hpp"

void call(const distmoe::Config& config, const distmoe::RoutedInput& input,
          const distmoe::ExpertWeights& weights, const distmoe::TensorView& y_TD) {
#ifdef MISUSE
  distmoe::routed_experts(distmoe::Context::create(config), input, weights, y_TD);
#else
  distmoe::Context context = distmoe::Context::create(config);
  distmoe::routed_experts(context, input, weights, y_TD);
#endif
}
