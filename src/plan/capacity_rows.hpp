// SPDX-License-Identifier: Apache-2.0
//
// Rows that a capacity factor plans for, from a valid configuration.
#pragma once

#include <cstdint>

#include "distmoe/config.hpp"
#include "layout/packed_row.hpp"

namespace distmoe {

/// Block-scaled precisions pad the rows of every expert to a multiple of this.
inline constexpr std::int64_t kExpertRowAlignment = 128;

/// What the rows of an expert are padded to a multiple of: 1 where they are not.
constexpr std::int64_t expert_row_alignment(Precision precision) {
  return is_block_scaled(precision) ? kExpertRowAlignment : 1;
}

/// cap(factor): received rows of one rank, padding not counted. `factor` is positive.
std::int64_t capacity_rows(const Config& config, int ep_size, double factor);

/// rows(factor): capacity_rows with the padding of the precision.
std::int64_t padded_capacity_rows(const Config& config, int ep_size, double factor);

}  // namespace distmoe
