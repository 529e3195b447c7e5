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
               place(weights.bias2_LD), weights.prepared_w13,  weights.prepared_w2},
      y_(place(y)) {}

TensorView DeviceCall::place(const TensorView& host) {
  if (!is_on_device_ || !host.is_given()) return host;
  buffers_.emplace_back(host.num_bytes(), device_);
  TensorView copy = host;
  copy.data = buffers_.back().data();
  copy.device = {DeviceType::kCuda, device_};
  copy_in(host, copy);
  return copy;
}

void DeviceCall::copy_in(const TensorView& host, const TensorView& device) const {
  for (const cuda::DeviceBuffer& buffer : buffers_) {
    if (buffer.data() == device.data) buffer.upload(host.data, host.num_bytes());
  }
}

void DeviceCall::bring(const RoutedInput& input, const TensorView& y) {
  host_y_ = y;
  if (!is_on_device_) {
    input_ = input;
    y_ = y;
    return;
  }
  copy_in(input.x_TD, input_.x_TD);
  copy_in(input.topk_ids_TK, input_.topk_ids_TK);
  copy_in(input.topk_scores_TK, input_.topk_scores_TK);
}

void DeviceCall::capture(Context& context) {
  graph_ = std::make_unique<cuda::DeviceGraph>(device_, [&](void* stream) {
    routed_experts(context, input_, weights_, y_, {.stream = stream});
  });
}

void DeviceCall::run(Context& context) {
  if (graph_) {
    graph_->replay();
  } else {
    routed_experts(context, input_, weights_, y_);
  }
  context.check();
}

void DeviceCall::fetch_y() {
  if (is_on_device_) buffers_.back().download(host_y_.data, host_y_.num_bytes());
}

}  // namespace distmoe::tools
