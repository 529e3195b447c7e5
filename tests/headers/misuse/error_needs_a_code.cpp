// SPDX-License-Identifier: Apache-2.0
//
// An error without a code cannot be acted upon.
#include "distmoe/error.hpp"

distmoe::Error make() {
#ifdef MISUSE
  return distmoe::Error("something failed");
#else
  return distmoe::Error(distmoe::ErrorCode::kIo, "something failed");
#endif
}
