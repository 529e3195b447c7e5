// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "distmoe/communicator.hpp"
#include "distmoe/context.hpp"
#include "distmoe/error.hpp"

namespace distmoe {

/// The collective creation of a context: ranks compare their configurations, share the cores of
/// their machines, plan and allocate; if one of them cannot, all of them fail. `communicator` may
/// be null for a single rank. A rank with a `reason` takes part to refuse.
std::unique_ptr<ContextImpl> create_context(const Config& config,
                                            const std::shared_ptr<Communicator>& communicator,
                                            const ContextOptions& options,
                                            const Error* reason = nullptr);

}  // namespace distmoe
