// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "io/checkpoint.hpp"
#include "io/expert_catalog.hpp"

namespace distmoe {

/// Row of W13 for row i of 2F interleaved ones: g0, u0, g1, u1, ...
inline std::int64_t concatenated_row(std::int64_t interleaved, std::int64_t f) {
  return interleaved / 2 + (interleaved % 2 == 0 ? 0 : f);
}

/// The experts [first, first + count) of a layer, which must exist.
struct ExpertRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Sizes and biases. Throws out_of_memory.
ExpertBiases load_biases(const LayerTensors& tensors, const LayerShape& shape,
                         const ExpertRange& range);

/// Converts to BF16. Throws io for a scale that is no finite number and out_of_memory.
LoadedExperts load_experts(const LayerTensors& tensors, const LayerShape& shape,
                           const ExpertRange& range);

}  // namespace distmoe
