// SPDX-License-Identifier: Apache-2.0
#include "distmoe/refusal.hpp"

#include <utility>

#include "distmoe/routed_experts.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "runtime/backward.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/forward.hpp"
#include "runtime/handshake.hpp"

namespace distmoe {

void refuse_routed_experts(Context& context, const Error& reason, void* stream) {
  const CallOptions options{.stream = stream};
  run_forward(context.impl(),
              {.input = {}, .weights = {}, .y_TD = {}, .options = options, .refusal = &reason});
  throw Error(reason);
}

void refuse_routed_experts_backward(Context& context, const Error& reason, void* stream) {
  const CallOptions options{.stream = stream};
  run_backward(context.impl(), {.saved = {},
                                .dy_TD = {},
                                .weights = {},
                                .gradients = {},
                                .options = options,
                                .refusal = &reason});
  throw Error(reason);
}

void refuse_context(std::shared_ptr<Communicator> communicator, const Error& reason) {
  create_context(Config{}, communicator, {}, &reason);
  throw Error(reason);
}

void agree(Context& context, const std::optional<Error>& failure) { context.impl().agree(failure); }

}  // namespace distmoe
