// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe {

/// Where a received row comes from: route k of a token of a source rank.
struct RowOrigin {
  std::int32_t source = 0;
  std::int32_t token = 0;
  std::int32_t k = 0;
};
static_assert(sizeof(RowOrigin) == 12);

}  // namespace distmoe
