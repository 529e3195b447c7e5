// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "distmoe/prepared_weight.hpp"
#include "distmoe/routed_experts.hpp"
#include "io/checkpoint.hpp"

namespace distmoe::tools {

/// Which experts of a checkpoint, and what for.
struct WeightRequest {
  std::int64_t layer = 0;
  std::int64_t first_expert = 0;
  std::int64_t num_experts = 0;
  Precision precision = Precision::kBF16;
  bool inference = true;
};

/// The experts of a rank as a context of a precision takes them: BF16; codes as the checkpoint has
/// them, where it has those of the precision; or prepared from BF16.
class LayerWeights {
 public:
  LayerWeights() = default;
  /// Of another precision than BF16 the codes and scales alone are kept, and the biases. Throws as
  /// Checkpoint does, and invalid_argument where the precision cannot hold the layer.
  LayerWeights(const Checkpoint& checkpoint, const WeightRequest& request);

  ExpertWeights view() const;
  /// Whether the codes are those of the checkpoint.
  bool has_stored_codes() const { return has_stored_codes_; }
  std::int64_t num_bytes() const;

 private:
  bool load_codes(const Checkpoint& checkpoint, const WeightRequest& request);

  CodedExperts coded_;     ///< with stored codes
  LoadedExperts experts_;  ///< else; matrices of BF16 alone
  PreparedWeight w13_;
  PreparedWeight w2_;
  bool has_stored_codes_ = false;  // behind what load_codes() fills
};

}  // namespace distmoe::tools
