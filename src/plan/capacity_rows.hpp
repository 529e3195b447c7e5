// SPDX-License-Identifier: Apache-2.0
//
// Rows that a capacity factor plans for, from a valid configuration.
#pragma once

#include <cstdint>

#include "distmoe/config.hpp"

namespace distmoe {

/// Block-scaled precisions pad the rows of every expert to a multiple of this.
inline constexpr std::int64_t kExpertRowAlignment = 128;

/// cap(factor): received rows of one rank, padding not counted. `factor` is positive.
std::int64_t capacity_rows(const Config& config, int ep_size, double factor);

/// rows(factor): capacity_rows with the padding of the precision.
std::int64_t padded_capacity_rows(const Config& config, int ep_size, double factor);

}  // namespace distmoe
