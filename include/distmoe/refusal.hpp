// SPDX-License-Identifier: Apache-2.0
//
// What one rank meets outside of its calls, told to its peers, which would wait for a call that
// does not come. For bindings, which read the arguments of a call before there is one, and for
// callers with programs of their own between calls.
#pragma once

#include <memory>
#include <optional>

#include "distmoe/communicator.hpp"
#include "distmoe/context.hpp"
#include "distmoe/error.hpp"
#include "distmoe/export.hpp"

namespace distmoe {

/// Takes this rank's part in the forward that its peers make, where it has no arguments for one.
/// Throws as a call whose arguments it refuses: here `reason` with the rank and the call, on the
/// peers an error of its code; nothing is written and the next call works. Whether the peers' call
/// saves does not matter. `stream` as in CallOptions; on CUDA Context::check() throws on the peers.
[[noreturn]] DISTMOE_EXPORT void refuse_routed_experts(Context& context, const Error& reason,
                                                       void* stream = nullptr);

/// The same in place of a backward: the peers' is refused as if an argument here were wrong.
[[noreturn]] DISTMOE_EXPORT void refuse_routed_experts_backward(Context& context,
                                                                const Error& reason,
                                                                void* stream = nullptr);

/// The same in place of Context::create: no rank gets a context, and all may create another.
/// `communicator` may be null.
[[noreturn]] DISTMOE_EXPORT void refuse_context(std::shared_ptr<Communicator> communicator,
                                                const Error& reason);

/// Collective, between calls: throws on every rank where any gives a `failure`, with its code, and
/// the next call works. Hosts meet; no device is waited for.
DISTMOE_EXPORT void agree(Context& context, const std::optional<Error>& failure);

}  // namespace distmoe
