// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "distmoe/error.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {

/// The steps of a backward call, and its end.
enum class BackwardStep {
  kPublish,
  kCarve,
  kRestoreActivations,
  kDispatchGradH3,
  kW2Dgrad,
  kW2Wgrad,
  kSwigluBackward,
  kW13Wgrad,
  kW13DgradScatter,
  kReduceGradients,
  kEnd
};

/// As traces and profilers name it: "w2_dgrad"; "end" of kEnd.
const char* to_string(BackwardStep step) noexcept;

/// Is told which step this rank takes next, as StepObserver of runtime/forward.hpp is.
using BackwardStepObserver = std::function<void(BackwardStep next)>;

/// What a caller of a backward brings.
struct BackwardArguments {
  const SavedForward& saved;
  const TensorView& dy_TD;
  const ExpertWeights& weights;
  const RoutedGradients& gradients;
  const CallOptions& options;
  const BackwardStepObserver* observer = nullptr;  ///< null: nobody watches
  const Error* refusal = nullptr;  ///< not null: the caller has no call to make, for this reason
};

/// The backward sequence of one call; on success the slot no longer keeps `saved`.
void run_backward(ContextImpl& context, const BackwardArguments& arguments);

}  // namespace distmoe
