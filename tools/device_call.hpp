// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <memory>

#include "backend/cuda/device.hpp"
#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"

namespace distmoe::tools {

/// One rank's call with its tensors where the backend wants them: on the CPU the host's own, on
/// CUDA copies on a device. Tensors are row-major without gaps.
class DeviceCall {
 public:
  DeviceCall(BackendKind backend, int device, const RoutedInput& input,
             const ExpertWeights& weights, const TensorView& y);

  /// The next calls read `input`, of the shapes and types of the first, and write `y`. Inputs stay
  /// where they are on a device: their values are copied there.
  void bring(const RoutedInput& input, const TensorView& y);
  /// Records the call once, in a CUDA graph that later runs replay.
  void capture(Context& context);
  /// Runs the call and returns when y is complete on the device that computes it.
  void run(Context& context);
  const RoutedInput& input() const { return input_; }
  const ExpertWeights& weights() const { return weights_; }
  const TensorView& y() const { return y_; }
  /// Brings y to the host memory of the caller.
  void fetch_y();

 private:
  TensorView place(const TensorView& host);
  void copy_in(const TensorView& host, const TensorView& device) const;

  bool is_on_device_;
  int device_;
  std::deque<cuda::DeviceBuffer> buffers_;
  TensorView host_y_;
  RoutedInput input_;
  ExpertWeights weights_;
  TensorView y_;
  std::unique_ptr<cuda::DeviceGraph> graph_;
};

}  // namespace distmoe::tools
