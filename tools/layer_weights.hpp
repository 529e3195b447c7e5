// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "distmoe/prepared_weight.hpp"
#include "distmoe/routed_experts.hpp"
#include "io/checkpoint.hpp"

namespace distmoe::tools {

/// The experts of a rank as a context of a precision takes them: as they were loaded, or prepared.
class LayerWeights {
 public:
  LayerWeights() = default;
  /// Of another precision than BF16 the codes and scales alone are kept, of the loaded experts the
  /// biases. Throws invalid_argument where the precision cannot hold the layer.
  LayerWeights(LoadedExperts experts, Precision precision, bool inference);

  ExpertWeights view() const;
  const PreparedWeightView& w13() const { return w13_.view(); }
  const PreparedWeightView& w2() const { return w2_.view(); }
  std::int64_t num_bytes() const;

 private:
  LoadedExperts experts_;
  PreparedWeight w13_;
  PreparedWeight w2_;
};

}  // namespace distmoe::tools
