// SPDX-License-Identifier: Apache-2.0
#include "conformance/placed_call.hpp"

#include <memory>
#include <vector>

#include "runtime/context_impl.hpp"

namespace distmoe::conformance {

DeviceTensor::DeviceTensor(const PackedTensor& host, int device)
    : buffer_(host.bytes().size(), device), view_(host.view()) {
  if (!view_.is_given()) return;
  upload(host);
  const auto offset =
      view_.data == nullptr ? 0 : static_cast<std::byte*>(view_.data) - host.bytes().data();
  view_.data = static_cast<std::byte*>(buffer_.data()) + offset;
  view_.device = {DeviceType::kCuda, device};
}

void DeviceTensor::upload(const PackedTensor& host) const {
  buffer_.upload(host.bytes().data(), host.bytes().size());
}

void DeviceTensor::download(const PackedTensor& host) const {
  if (buffer_.size() > 0) buffer_.download(host.data(), buffer_.size());
}

DeviceCall::DeviceCall(const RankCall& call, int device)
    : x(call.x, device),
      ids(call.ids, device),
      scores(call.scores, device),
      w13(call.w13, device),
      w2(call.w2, device),
      bias13(call.bias13, device),
      bias2(call.bias2, device),
      y(call.y, device) {}

std::vector<BF16> DeviceCall::y_rows() const {
  std::vector<std::byte> bytes(y.buffer().size());
  y.buffer().download(bytes.data(), bytes.size());
  const TensorView& view = y.view();
  std::vector<BF16> rows;
  if (view.num_elements() == 0) return rows;
  const auto* first = reinterpret_cast<const BF16*>(bytes.data());
  for (std::int64_t token = 0; token < view.shape[0]; ++token) {
    const BF16* row = first + token * view.strides[0];
    rows.insert(rows.end(), row, row + view.shape[1]);
  }
  return rows;
}

namespace {

/// NOTE: cudaFree waits until the device is idle, and a peer on the same device may already wait
/// there for this rank's next call. So the copies of a rank live as long as its thread.
std::vector<std::unique_ptr<DeviceCall>>& copies_of_this_rank() {
  thread_local std::vector<std::unique_ptr<DeviceCall>> copies;
  return copies;
}

}  // namespace

void call_experts(Context& context, const RankCall& call) {
  const Device device = context.impl().device();
  if (device.type == DeviceType::kCpu) {
    routed_experts(context, call.input, call.weights, call.y_view());
    return;
  }
  std::vector<std::unique_ptr<DeviceCall>>& copies = copies_of_this_rank();
  if (context.size() == 1) copies.clear();
  copies.push_back(std::make_unique<DeviceCall>(call, device.index));
  const DeviceCall& placed = *copies.back();
  routed_experts(context, placed.input(), placed.weights(), placed.y.view());
  try {
    context.check();
  } catch (const Error&) {
    placed.y.download(call.y);
    throw;
  }
  placed.y.download(call.y);
}

}  // namespace distmoe::conformance
