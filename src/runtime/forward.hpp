// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "distmoe/error.hpp"
#include "distmoe/routed_experts.hpp"
#include "distmoe/saved_forward.hpp"
#include "runtime/context_impl.hpp"
#include "runtime/saved_forward_impl.hpp"

namespace distmoe {

/// The steps of a forward call, and its end. An exchange has dispatch_rows() and return_rows() in
/// the place of the products.
enum class ForwardStep { kPublish, kRoute, kCarve, kDispatchW13Swiglu, kW2Scatter, kCombine, kEnd };

/// As traces and profilers name it: "dispatch_w13_swiglu"; "end" of kEnd.
const char* to_string(ForwardStep step) noexcept;

/// Is told which step this rank takes next, on the thread of the call; on CUDA the steps before it
/// are enqueued by then. At the end the slots know of the call, but no other may begin yet.
using StepObserver = std::function<void(ForwardStep next)>;

/// What a caller of a forward brings.
struct ForwardArguments {
  const RoutedInput& input;
  const ExpertWeights& weights;
  const TensorView& y_TD;
  const CallOptions& options;
  /// Not null: the call keeps what its backward needs in the selected slot, and puts here what
  /// knows of it. On success it is live and the slot has it for its last.
  std::unique_ptr<SavedForwardImpl>* saved = nullptr;
  const StepObserver* observer = nullptr;  ///< null: nobody watches
  bool exchanges_rows = false;             ///< no products: rows go and come back, to be measured
  const Error* refusal = nullptr;  ///< not null: the caller has no call to make, for this reason
};

/// The forward sequence of one call.
void run_forward(ContextImpl& context, const ForwardArguments& arguments);

/// The same of a call that saves, and what its backward needs.
SavedForward run_saving_forward(ContextImpl& context, ForwardArguments arguments);

}  // namespace distmoe
