// SPDX-License-Identifier: Apache-2.0
//
// distmoe.PreparedWeight: the arrays of a prepared weight as Python objects, and weights of a call
// that are given as BF16 or prepared.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "distmoe/prepared_weight.hpp"
#include "tensor_argument.hpp"

namespace distmoe::python {

/// Codes, scales and global scales (None, where the format has none) as any tensors of their bits:
/// uint8, and FP32.
struct PreparedObject {
  BlockScaledConfig config;
  nanobind::object codes, scales, global_scales;
  bool has_known_scales = false;
};

/// The views of a PreparedObject, while this exists.
class PreparedArgument {
 public:
  PreparedArgument(const char* name, const PreparedObject& weight, Access access,
                   std::uintptr_t stream);
  const PreparedWeightView& view() const { return view_; }

 private:
  TensorArgument codes_, scales_, global_scales_;
  PreparedWeightView view_;
};

/// One weight of a call: a tensor, or a PreparedObject.
class WeightArgument {
 public:
  WeightArgument(const char* name, nanobind::handle weight, std::uintptr_t stream);
  TensorView view() const { return tensor_ ? tensor_->view() : TensorView{}; }
  PreparedWeightView prepared() const {
    return prepared_ ? prepared_->view() : PreparedWeightView{};
  }

 private:
  std::optional<TensorArgument> tensor_;
  std::optional<PreparedArgument> prepared_;
};

void bind_prepared_weight(nanobind::module_& module);

}  // namespace distmoe::python
