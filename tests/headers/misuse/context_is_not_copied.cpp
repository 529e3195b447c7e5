// SPDX-License-Identifier: Apache-2.0
//
// A context owns its memory: it moves, it is never copied.
#include <utility>

#include "distmoe/context.hpp"

distmoe::Context take(distmoe::Context& context) {
#ifdef MISUSE
  return context;
#else
  return std::move(context);
#endif
}
