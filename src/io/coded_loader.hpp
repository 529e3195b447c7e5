// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "io/checkpoint.hpp"
#include "io/expert_catalog.hpp"

namespace distmoe {

/// Copies the codes of the experts [first_expert, first_expert + num_experts), which must exist, of
/// a layer. Checkpoint::load_coded_experts says what is thrown.
CodedExperts load_coded_experts(const LayerTensors& tensors, const LayerShape& shape,
                                std::int64_t first_expert, std::int64_t num_experts);

}  // namespace distmoe
