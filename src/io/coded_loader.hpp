// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "io/checkpoint.hpp"
#include "io/expert_catalog.hpp"
#include "io/expert_loader.hpp"

namespace distmoe {

/// Copies the codes. Checkpoint::load_coded_experts says what is thrown.
CodedExperts load_coded_experts(const LayerTensors& tensors, const LayerShape& shape,
                                const ExpertRange& range, BlockShape blocks);

}  // namespace distmoe
