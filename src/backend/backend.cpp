// SPDX-License-Identifier: Apache-2.0
#include "backend/backend.hpp"

#include "comm/agreement.hpp"
#include "core/check.hpp"

namespace distmoe {

void Backend::dispatch_rows(const ForwardCall&) {
  throw_error(ErrorCode::kUnsupported, "this backend exchanges no rows without their products");
}
void Backend::return_rows(const ForwardCall&) {}  // no sequence gets past dispatch_rows()

void Backend::publish_backward(const BackwardCall& call, const std::optional<Error>&) {
  throw AgreedError(ErrorCode::kUnsupported,
                    concat("call ", call.index, ": this backend has no backward in this version"));
}

// No sequence gets past publish_backward().
void Backend::carve_backward(const BackwardCall&) {}
void Backend::restore_activations(const BackwardCall&) {}
void Backend::dispatch_grad_h3(const BackwardCall&) {}
void Backend::w2_dgrad(const BackwardCall&) {}
void Backend::w2_wgrad(const BackwardCall&) {}
void Backend::swiglu_backward(const BackwardCall&) {}
void Backend::w13_wgrad(const BackwardCall&) {}
void Backend::w13_dgrad_scatter(const BackwardCall&) {}
void Backend::reduce_gradients(const BackwardCall&) {}

}  // namespace distmoe
