// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>

#include "backend/cuda/device.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"

namespace distmoe::tools {

/// One rank's call with its tensors where the backend wants them: on the CPU the host's own, on
/// CUDA copies on a device.
class DeviceCall {
 public:
  /// `y` stays the caller's host memory. Tensors are row-major without gaps.
  DeviceCall(BackendKind backend, int device, const RoutedInput& input,
             const ExpertWeights& weights, const TensorView& y);

  /// Runs the call and returns when y is complete on the device that computes it.
  void run(Context& context);
  /// Brings y to the host memory of the caller.
  void fetch_y();

 private:
  TensorView place(const TensorView& host);

  bool is_on_device_;
  int device_;
  std::deque<cuda::DeviceBuffer> buffers_;
  TensorView host_y_;
  RoutedInput input_;
  ExpertWeights weights_;
  TensorView y_;
};

}  // namespace distmoe::tools
