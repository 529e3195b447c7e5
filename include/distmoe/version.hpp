// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "distmoe/export.hpp"

/// Version of these headers. `distmoe::version()` is the version of the library that was loaded.
#define DISTMOE_VERSION_MAJOR 0
#define DISTMOE_VERSION_MINOR 1
#define DISTMOE_VERSION_PATCH 0

namespace distmoe {

/// "major.minor.patch" of the loaded library; the pointer is valid for the life of the process.
DISTMOE_EXPORT const char* version() noexcept;

}  // namespace distmoe
