// SPDX-License-Identifier: Apache-2.0
//
// The options of `distmoe run --train`, parsed and checked one by one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "distmoe/config.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

struct TrainOptions {
  bool is_on = false;  ///< --train
  WgradDType wgrad_dtype = WgradDType::kSameAsWeight;
  bool accumulates = false;  ///< weight gradients of all backwards of a run add up
  ActivationPolicy activation_policy = ActivationPolicy::kFull;
  std::int64_t layers_per_slot = 1;
  std::int64_t num_slots = 1;
  std::optional<double> slot_factor;  ///< empty: everything is computed again
  std::int64_t num_microbatches = 1;
  std::optional<double> norm_eps;    ///< of a post-expert RMSNorm; empty: none
  std::optional<double> clip_limit;  ///< empty: nothing is counted
  std::string first_given;           ///< the first of these options besides --train; empty: none

  /// Forwards, and as many backwards, of one run.
  std::int64_t num_forwards() const { return num_microbatches * layers_per_slot; }
  /// The training part of a configuration; nothing where --train is not given.
  void configure(Config& config) const;
};

/// Declares the options; parsing `app` fills `options`, which must outlive it.
void add_train_options(CLI::App& app, TrainOptions& options);

}  // namespace distmoe::tools
