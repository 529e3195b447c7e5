// SPDX-License-Identifier: Apache-2.0
//
// The matrices of experts as codes, as checkpoints store them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "io/checkpoint.hpp"
#include "layer_weights.hpp"

namespace distmoe::tools {

/// "mxfp8", "mxfp4" or "nvfp4".
const char* format_name(StoredFormat format);
/// One matrix [N, K], row by row.
struct QuantisedMatrix {
  std::span<const std::byte> codes;
  std::span<const std::byte> scales;
  float global_scale = 1.0f;  ///< kNvfp4
};

/// The codes with which a context computes that is given the experts of a checkpoint: those that
/// the checkpoint has, where they are of the format, or else of the BF16 weights.
struct QuantisedExpert {
  LayerWeights weights;  ///< what the matrices are parts of
  QuantisedMatrix gate{};
  QuantisedMatrix up{};
  QuantisedMatrix down{};
};

/// Of one expert, whose K are multiples of the block. Throws as LayerWeights does, and unsupported
/// where a weight is NaN, infinite or too large for the format.
QuantisedExpert quantise_expert(const Checkpoint& checkpoint, std::int64_t layer,
                                std::int64_t expert, StoredFormat format);

}  // namespace distmoe::tools
