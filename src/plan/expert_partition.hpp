// SPDX-License-Identifier: Apache-2.0
//
// Which rank owns which expert: contiguous blocks; the first E mod P ranks own one more. A rank may
// own none. Arguments: E = num_experts >= 0, P = ep_size >= 1, 0 <= rank < P, 0 <= expert < E.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe {

DISTMOE_HOST_DEVICE constexpr std::int64_t num_local_experts(std::int64_t num_experts,
                                                             std::int64_t ep_size,
                                                             std::int64_t rank) {
  return num_experts / ep_size + (rank < num_experts % ep_size ? 1 : 0);
}

/// Of the rank that owns most: L of the memory plan.
DISTMOE_HOST_DEVICE constexpr std::int64_t max_local_experts(std::int64_t num_experts,
                                                             std::int64_t ep_size) {
  return num_local_experts(num_experts, ep_size, 0);
}

/// The first expert of `rank`; for a rank without experts, the one that would come next. With
/// `rank` = P it is E.
DISTMOE_HOST_DEVICE constexpr std::int64_t first_expert(std::int64_t num_experts,
                                                        std::int64_t ep_size, std::int64_t rank) {
  const std::int64_t longer = num_experts % ep_size;
  return rank * (num_experts / ep_size) + (rank < longer ? rank : longer);
}

/// The rank that owns `expert`.
DISTMOE_HOST_DEVICE constexpr std::int64_t expert_owner(std::int64_t num_experts,
                                                        std::int64_t ep_size, std::int64_t expert) {
  const std::int64_t shorter_block = num_experts / ep_size;
  const std::int64_t longer = num_experts % ep_size;
  const std::int64_t in_longer_blocks = longer * (shorter_block + 1);
  return expert < in_longer_blocks ? expert / (shorter_block + 1)
                                   : longer + (expert - in_longer_blocks) / shorter_block;
}

}  // namespace distmoe
