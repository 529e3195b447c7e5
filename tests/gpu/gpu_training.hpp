// SPDX-License-Identifier: Apache-2.0
//
// Training steps of ranks with a GPU each, or several on one.
#pragma once

#include "conformance/moe_gradients.hpp"
#include "gpu/gpu_ranks.hpp"

namespace distmoe::gpu {

/// A saving forward and its backward, enqueued.
void train(Context& context, const conformance::DeviceCall& call,
           const conformance::DeviceGradients& gradients, void* stream = nullptr);

/// Training contexts of ranks on `devices`, with slots and policy as `form` says.
GpuRun training_run(std::int64_t num_tokens, const Devices& devices,
                    const conformance::BackwardForm& form);

/// The part of this rank; zeros elsewhere.
conformance::GradientValues fetched(const conformance::MoeProblem& problem,
                                    const conformance::RankGradients& host,
                                    const conformance::DeviceGradients& device);

/// What a rank trains.
struct Training {
  const conformance::MoeProblem& problem;
  const std::vector<BF16>& dy;
  const conformance::BackwardForm& form;
  const GpuRun& run;
};

/// A step that must succeed; its gradients live as long as the rank's thread.
conformance::GradientValues trained(Context& context, const conformance::DeviceCall& call,
                                    const Training& training);

}  // namespace distmoe::gpu
