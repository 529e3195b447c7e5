// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "core/check.hpp"
#include "distmoe/error.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {

/// The call that `check` makes of its arguments. A refusal is returned, not thrown, since the peers
/// must hear of it first: with its reason in `refusal` the call is `refused`, on the caller's
/// stream unless that is what is wrong.
template <typename Call, typename Check>
Call check_at_the_door(const ContextImpl& context, Backend& backend, Call refused, void* stream,
                       const Check& check, std::optional<Error>& refusal) {
  try {
    backend.check_stream(refused.index, stream);
    refused.stream = stream;
    return check();
  } catch (const Error& error) {
    refusal = Error(error.code(),
                    concat("rank ", context.rank(), ", call ", refused.index, ": ", error.what()));
    return refused;
  }
}

}  // namespace distmoe
