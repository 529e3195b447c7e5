// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/context_check.hpp"

#include <cuda_runtime_api.h>

#include <utility>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/kernels/grad_dispatch.hpp"
#include "core/check.hpp"
#include "plan/capacity_rows.hpp"

namespace distmoe::cuda {
namespace {

/// Allocations are illegal while a stream is captured, and would end the capture.
void refuse_inside_a_capture() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(cudaStreamLegacy, &status);
  cudaGetLastError();
  DISTMOE_CHECK(error != cudaErrorStreamCaptureImplicit, kUnsupported,
                "a stream is being captured into a CUDA graph: a context allocates memory and is "
                "created before the capture begins");
}

/// What training cannot do here.
void check_training(const Config& config, const MemoryPlan& plan) {
  if (config.inference) return;
  // Coordinates of the gradients' tensor maps.
  constexpr std::int64_t kMostBytes = std::int64_t{128} << 31;
  DISTMOE_CHECK(plan.total_virtual_bytes <= kMostBytes, kUnsupported, "slots and scratch are ",
                plan.total_virtual_bytes, " bytes; to train, the CUDA backend addresses ",
                kMostBytes);
  DISTMOE_CHECK(fits_grad_dispatch(config.hidden_dim * 2), kUnsupported, "hidden_dim is ",
                config.hidden_dim,
                "; to train, the CUDA backend keeps a row in the memory of an SM");
}

}  // namespace

ChoiceInputs choice_inputs(const BackendSetup& setup) {
  const Config& config = setup.config;
  return {.precision = config.precision,
          .kernel_choice = config.kernel_choice,
          .hidden_dim = config.hidden_dim,
          .intermediate_dim = config.intermediate_dim,
          .top_k = config.top_k,
          .num_experts = config.num_experts,
          .num_ranks = setup.size,
          .combine = config.combine,
          .allowed_sms = config.num_sms};
}

BackendSetup check_device(BackendSetup setup) {
  const std::string reason = why_unavailable();
  DISTMOE_CHECK(reason.empty(), kUnsupported, "CUDA is not available: ", reason);
  DISTMOE_CHECK(setup.device >= 0 && setup.device < device_count(), kInvalidArgument,
                "device must be 0 to ", device_count() - 1, ", got ", setup.device);
  const std::string problem = why_unusable(setup.device);
  DISTMOE_CHECK(problem.empty(), kUnsupported, "CUDA is not available: ", problem);
  check_supported(choice_inputs(setup));
  check_indices(capacity_rows(setup.config, setup.size, setup.plan.total_scratch_factor),
                setup.size, setup.config.max_tokens);
  check_training(setup.config, setup.plan);
  DISTMOE_CUDA_CHECK(cudaSetDevice(setup.device));
  refuse_inside_a_capture();
  return setup;
}

}  // namespace distmoe::cuda
