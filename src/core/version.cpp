// SPDX-License-Identifier: Apache-2.0
#include "distmoe/version.hpp"

#define DISTMOE_STRINGIFY_VALUE(value) #value
#define DISTMOE_STRINGIFY(macro) DISTMOE_STRINGIFY_VALUE(macro)

namespace distmoe {

const char* version() noexcept {
  return DISTMOE_STRINGIFY(DISTMOE_VERSION_MAJOR) "." DISTMOE_STRINGIFY(
      DISTMOE_VERSION_MINOR) "." DISTMOE_STRINGIFY(DISTMOE_VERSION_PATCH);
}

}  // namespace distmoe
