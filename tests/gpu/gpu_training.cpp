// SPDX-License-Identifier: Apache-2.0
#include "gpu/gpu_training.hpp"

#include <memory>
#include <utility>

#include "distmoe/routed_experts_backward.hpp"

namespace distmoe::gpu {

using conformance::BackwardForm;
using conformance::DeviceCall;
using conformance::DeviceGradients;
using conformance::GradientValues;
using conformance::MoeProblem;
using conformance::RankGradients;

void train(Context& context, const DeviceCall& call, const DeviceGradients& gradients,
           void* stream) {
  SavedForward saved = saving_routed_experts(context, call.input(), call.weights(), call.y.view(),
                                             {.stream = stream});
  routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights(),
                          gradients.destinations(), {.stream = stream});
}

GpuRun training_run(std::int64_t num_tokens, const Devices& devices, const BackwardForm& form) {
  return {.devices = devices,
          .counts = conformance::even_split(num_tokens, static_cast<int>(devices.size())),
          .adjust = [factor = form.slot_factor, policy = form.policy](Config& config) {
            config.inference = false;
            config.activation_policy = policy;
            config.activation_slot_capacity_factor = factor;
          }};
}

GradientValues fetched(const MoeProblem& problem, const RankGradients& host,
                       const DeviceGradients& device) {
  device.fetch();
  GradientValues values(problem);
  host.copy_to(values);
  return values;
}

GradientValues trained(Context& context, const DeviceCall& call, const Training& training) {
  const auto& [problem, dy, form, run] = training;
  const RankGradients host(problem, dy, form, run.counts, context.rank());
  // NOTE: cudaFree waits until the device is idle, and a peer on the same device may already wait
  // there for this rank's next call. So the gradients of a rank live as long as its thread.
  thread_local std::vector<std::unique_ptr<DeviceGradients>> of_this_rank;
  const int device = run.devices[static_cast<std::size_t>(context.rank())];
  of_this_rank.push_back(std::make_unique<DeviceGradients>(host, device));
  const DeviceGradients& gradients = *of_this_rank.back();
  train(context, call, gradients);
  context.check();
  return fetched(problem, host, gradients);
}

}  // namespace distmoe::gpu
