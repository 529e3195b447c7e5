// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "formats/host_device.hpp"

namespace distmoe {

/// std::bit_cast for C++17, which device code is compiled as.
template <typename To, typename From>
DISTMOE_HOST_DEVICE constexpr To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

}  // namespace distmoe
