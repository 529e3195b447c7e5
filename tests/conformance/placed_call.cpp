// SPDX-License-Identifier: Apache-2.0
#include "conformance/placed_call.hpp"

#include <array>
#include <cstdlib>
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

CallViews views_of(const RankCall& call) { return {call.input, call.weights, call.y_view()}; }

namespace {

bool holds(const PackedTensor& tensor, const void* address) {
  const auto* at = static_cast<const std::byte*>(address);
  return at >= tensor.bytes().data() && at < tensor.bytes().data() + tensor.bytes().size();
}

/// A tensor and its copy.
struct Placement {
  const PackedTensor* host;
  const DeviceTensor* copy;
};

std::array<Placement, 8> placements(const RankCall& packed, const DeviceCall& copy) {
  return {{{&packed.x, &copy.x},
           {&packed.ids, &copy.ids},
           {&packed.scores, &copy.scores},
           {&packed.w13, &copy.w13},
           {&packed.w2, &copy.w2},
           {&packed.bias13, &copy.bias13},
           {&packed.bias2, &copy.bias2},
           {&packed.y, &copy.y}}};
}

/// The bytes of other memory that a view spans, copied; where the view's first element is there.
void* copy_foreign(const TensorView& view, Device device, std::list<cuda::DeviceBuffer>& copies) {
  std::int64_t before = 0;
  std::int64_t behind = 1;
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(view.rank); ++dim) {
    const std::int64_t way = (view.shape[dim] - 1) * view.strides[dim];
    (way < 0 ? before : behind) += std::abs(way);
  }
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  const auto bytes = static_cast<std::size_t>((before + behind) * element);
  copies.emplace_back(bytes, device.index);
  copies.back().upload(static_cast<const std::byte*>(view.data) - before * element, bytes);
  return static_cast<std::byte*>(copies.back().data()) + before * element;
}

/// NOTE: cudaFree waits until the device is idle, and a peer on the same device may already wait
/// there for this rank's next call. So the copies of a rank live as long as its thread.
std::vector<std::unique_ptr<PlacedCall>>& copies_of_this_rank() {
  thread_local std::vector<std::unique_ptr<PlacedCall>> copies;
  return copies;
}

}  // namespace

PlacedCall::PlacedCall(Device device, const RankCall& packed, const CallViews& host_views)
    : views(host_views), packed_(packed) {
  if (device.type == DeviceType::kCpu) return;
  copy_ = std::make_unique<DeviceCall>(packed, device.index);
  auto& [x, ids, scores] = views.input;
  ExpertWeights& weights = views.weights;
  for (TensorView* view : {&x, &ids, &scores, &weights.w13_L2FD, &weights.w2_LDF,
                           &weights.bias13_L2F, &weights.bias2_LD, &views.y}) {
    place(*view, device);
  }
}

void PlacedCall::call(Context& context, const CallOptions& options) const {
  const Config& config = context.config();
  if (config.precision != Precision::kNVFP4 || views.weights.prepared_w13.is_given()) {
    return routed_experts(context, views.input, views.weights, views.y, options);
  }
  BlockScaledConfig format{.format = config.precision, .inference = true};
  const PreparedWeight w2 = prepare_block_scaled_weight(views.weights.w2_LDF, format);
  format.gate_up_layout = config.gate_up_layout;
  const PreparedWeight w13 = prepare_block_scaled_weight(views.weights.w13_L2FD, format);
  routed_experts(context, views.input,
                 {.bias13_L2F = views.weights.bias13_L2F,
                  .bias2_LD = views.weights.bias2_LD,
                  .prepared_w13 = w13.view(),
                  .prepared_w2 = w2.view()},
                 views.y, options);
}

void PlacedCall::place(TensorView& view, Device device) {
  if (view.device == Device{}) view.device = device;
  for (const Placement& tensor : placements(packed_, *copy_)) {
    if (!holds(*tensor.host, view.data)) continue;
    view.data = static_cast<std::byte*>(tensor.copy->buffer().data()) +
                (static_cast<std::byte*>(view.data) - tensor.host->bytes().data());
    return;
  }
  if (view.data != nullptr && view.num_elements() > 0) {
    view.data = copy_foreign(view, device, foreign_);
  }
}

void PlacedCall::collect() const {
  if (copy_ == nullptr) return;
  copy_->y.download(packed_.y);
  const auto* y = static_cast<const std::byte*>(views.y.data);
  const auto* x = static_cast<const std::byte*>(copy_->x.buffer().data());
  if (y >= x && y < x + copy_->x.buffer().size()) copy_->x.download(packed_.x);
}

void PlacedCall::poison_inputs() const {
  if (copy_ == nullptr) return;
  for (const DeviceTensor* input : {&copy_->x, &copy_->ids, &copy_->scores}) {
    const std::vector<std::byte> bytes(input->buffer().size(), std::byte{0xFF});
    if (!bytes.empty()) input->buffer().upload(bytes.data(), bytes.size());
  }
}

const PlacedCall& place_call(Context& context, const RankCall& call, const CallViews& views) {
  std::vector<std::unique_ptr<PlacedCall>>& copies = copies_of_this_rank();
  if (context.size() == 1) copies.clear();
  copies.push_back(std::make_unique<PlacedCall>(context.impl().device(), call, views));
  return *copies.back();
}

void call_experts(Context& context, const RankCall& call, const CallViews& views,
                  const CallOptions& options) {
  const Device device = context.impl().device();
  if (device.type == DeviceType::kCpu) {
    return PlacedCall(device, call, views).call(context, options);
  }
  const PlacedCall& placed = place_call(context, call, views);
  try {
    placed.call(context, options);
    context.check();
  } catch (const Error&) {
    placed.collect();
    throw;
  }
  placed.collect();
}

void call_experts(Context& context, const RankCall& call, const CallOptions& options) {
  call_experts(context, call, views_of(call), options);
}

PlacedTensor::PlacedTensor(Context& context, DType dtype, const std::vector<std::int64_t>& shape,
                           const PackedTensor::ValueAt& value_at)
    : host_(dtype, shape, {}, value_at) {
  const Device device = context.impl().device();
  if (device.type == DeviceType::kCpu) return;
  copy_ = std::make_shared<DeviceTensor>(host_, device.index);
  // Freed like the copies of a call.
  thread_local std::vector<std::shared_ptr<DeviceTensor>> tensors_of_this_rank;
  tensors_of_this_rank.push_back(copy_);
}

const PackedTensor& PlacedTensor::collect() const {
  if (copy_) copy_->download(host_);
  return host_;
}

}  // namespace distmoe::conformance
