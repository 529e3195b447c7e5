// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "io/checkpoint.hpp"
#include "io/expert_catalog.hpp"

namespace distmoe {

/// Converts the experts [first_expert, first_expert + num_experts), which must exist, of a layer.
/// Throws io for a scale that is no finite number and out_of_memory.
LoadedExperts load_experts(const LayerTensors& tensors, const LayerShape& shape,
                           std::int64_t first_expert, std::int64_t num_experts);

}  // namespace distmoe
