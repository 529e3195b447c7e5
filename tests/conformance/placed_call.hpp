// SPDX-License-Identifier: Apache-2.0
//
// A packed call where the context's backend wants it.
#pragma once

#include <list>
#include <memory>

#include "backend/cuda/device.hpp"
#include "conformance/moe_call.hpp"
#include "distmoe/context.hpp"

namespace distmoe::conformance {

/// A host tensor's copy on a device, with the same shape and strides.
class DeviceTensor {
 public:
  DeviceTensor(const PackedTensor& host, int device);
  const TensorView& view() const { return view_; }
  const cuda::DeviceBuffer& buffer() const { return buffer_; }
  void upload(const PackedTensor& host) const;
  /// Of all bytes, those between the rows too.
  void download(const PackedTensor& host) const;

 private:
  cuda::DeviceBuffer buffer_;
  TensorView view_;
};

/// One rank's call with everything on its device.
struct DeviceCall {
  DeviceTensor x, ids, scores, w13, w2, bias13, bias2, y;

  DeviceCall(const RankCall& call, int device);
  RoutedInput input() const { return {x.view(), ids.view(), scores.view()}; }
  ExpertWeights weights() const { return {w13.view(), w2.view(), bias13.view(), bias2.view()}; }
  /// y as it is on the device now, without gaps between its rows.
  std::vector<BF16> y_rows() const;
};

/// Views into the memory of a packed call, as its own or changed.
struct CallViews {
  RoutedInput input;
  ExpertWeights weights;
  TensorView y;
};
CallViews views_of(const RankCall& call);

/// The views where a backend wants them: themselves on the CPU, else the same views, strides,
/// offsets, nulls and all, into a copy of the packed call's memory, or of what else a view spans. A
/// view that says that it is on some GPU keeps saying so.
class PlacedCall {
 public:
  PlacedCall(Device device, const RankCall& packed, const CallViews& views);
  PlacedCall(Device device, const RankCall& packed)
      : PlacedCall(device, packed, views_of(packed)) {}

  /// Weights that the context takes prepared alone are prepared for the call.
  void call(Context& context, const CallOptions& options = {}) const;
  /// Brings back what may have been written: the tensor that y's view is of.
  void collect() const;
  /// Copies of x, ids and scores hold NaN and no expert from then on.
  void poison_inputs() const;

  CallViews views;

 private:
  void place(TensorView& view, Device device);

  const RankCall& packed_;
  std::unique_ptr<DeviceCall> copy_;  ///< null on the CPU
  std::list<cuda::DeviceBuffer> foreign_;
};

/// The copy of a call on the device of `context`, which lives as long as this rank's thread.
const PlacedCall& place_call(Context& context, const RankCall& call, const CallViews& views);
inline const PlacedCall& place_call(Context& context, const RankCall& call) {
  return place_call(context, call, views_of(call));
}

/// One call of `context`, waited for: what it throws, of the host or of the device, comes out here,
/// and y is in the packed call, that of a call that failed too.
void call_experts(Context& context, const RankCall& call, const CallViews& views,
                  const CallOptions& options = {});
void call_experts(Context& context, const RankCall& call, const CallOptions& options = {});

/// A tensor of a call's options, where the context's backend wants it.
class PlacedTensor {
 public:
  PlacedTensor(Context& context, DType dtype, const std::vector<std::int64_t>& shape,
               const PackedTensor::ValueAt& value_at);

  TensorView view() const { return copy_ ? copy_->view() : host_.view(); }
  /// On the host, with what it holds now.
  const PackedTensor& collect() const;

 private:
  PackedTensor host_;
  std::shared_ptr<DeviceTensor> copy_;  ///< null on the CPU
};

}  // namespace distmoe::conformance
