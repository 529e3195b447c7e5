// SPDX-License-Identifier: Apache-2.0
#include "device_call.hpp"

namespace distmoe::tools {

DeviceCall::DeviceCall(BackendKind backend, int device, const RoutedInput& input,
                       const ExpertWeights& weights, const TensorView& y)
    : is_on_device_(backend == BackendKind::kCuda),
      device_(device),
      host_y_(y),
      input_{place(input.x_TD), place(input.topk_ids_TK), place(input.topk_scores_TK)},
      weights_{place(weights.w13_L2FD), place(weights.w2_LDF), place(weights.bias13_L2F),
               place(weights.bias2_LD)},
      y_(place(y)) {}

TensorView DeviceCall::place(const TensorView& host) {
  if (!is_on_device_ || !host.is_given()) return host;
  buffers_.emplace_back(host.num_bytes(), device_);
  buffers_.back().upload(host.data, host.num_bytes());
  TensorView copy = host;
  copy.data = buffers_.back().data();
  copy.device = {DeviceType::kCuda, device_};
  return copy;
}

void DeviceCall::run(Context& context) {
  routed_experts(context, input_, weights_, y_);
  context.check();
}

void DeviceCall::fetch_y() {
  if (is_on_device_) buffers_.back().download(host_y_.data, host_y_.num_bytes());
}

}  // namespace distmoe::tools
