// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe {

/// A random number of this process. NOTE: process ids do not tell processes of two containers
/// apart.
std::uint64_t process_token();

}  // namespace distmoe
