// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "distmoe/routed_experts.hpp"
#include "distmoe/tensor.hpp"
#include "io/safetensors.hpp"
#include "io/tensor_storage.hpp"

namespace distmoe {

/// The input of one layer's experts, captured in a safetensors file: `layerN.x` BF16 [T, D],
/// `layerN.topk_ids` I32 or I64 [T, K], `layerN.topk_scores` F32 or BF16 [T, K] and, optionally,
/// `layerN.y_ref` F32 [T, D] and `layerN.dy` BF16 [T, D]. Where the file has none of layer N's
/// tensors, the same names without the prefix are read. Ids are not looked at: the library checks
/// them at its door.
class RoutedInputFile {
 public:
  /// Throws io for a file that cannot be read or understood, invalid_argument where a tensor is
  /// missing or has the wrong type or shape.
  static RoutedInputFile open(const std::filesystem::path& path, std::int64_t layer);

  /// All T tokens. Refers to the mapped file; aligned to the size of an element.
  const RoutedInput& input() const noexcept { return input_; }
  /// F32 [T, D]; `is_given()` is false where the file has no reference.
  const TensorView& y_ref() const noexcept { return y_ref_; }

  /// The gradient of y, BF16 [T, D]; `is_given()` is false where the file has none.
  const TensorView& dy() const noexcept { return dy_; }

  std::int64_t num_tokens() const noexcept { return input_.x_TD.shape[0]; }
  std::int64_t hidden_dim() const noexcept { return input_.x_TD.shape[1]; }
  std::int64_t top_k() const noexcept { return input_.topk_ids_TK.shape[1]; }

 private:
  explicit RoutedInputFile(SafetensorsFile file) : file_(std::move(file)) {}

  SafetensorsFile file_;
  std::vector<TensorStorage> realigned_;  ///< copies of what the file stores at odd addresses
  RoutedInput input_;
  TensorView y_ref_;
  TensorView dy_;
};

}  // namespace distmoe
