// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "distmoe/tensor.hpp"
#include "formats/bf16.hpp"

namespace distmoe {

/// A bias of every local expert, BF16 or FP32, strided; null data where there is none.
struct BiasRows {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t expert_stride = 0;
  std::int64_t stride = 1;

  float at(std::int64_t expert, std::int64_t index) const {
    const std::int64_t offset = expert * expert_stride + index * stride;
    return dtype == DType::kF32 ? static_cast<const float*>(data)[offset]
                                : to_float(static_cast<const BF16*>(data)[offset]);
  }
};

/// The weights of a call with every layout of the public API resolved: W13 as two matrices [F, D]
/// that share a row stride, so that concatenated, interleaved and [L, 2, F, D] weights look alike.
/// All strides in elements.
struct ExpertMatrices {
  const BF16* gate = nullptr;
  const BF16* up = nullptr;
  std::int64_t w13_row_stride = 0;
  std::int64_t w13_expert_stride = 0;
  const BF16* w2 = nullptr;
  std::int64_t w2_row_stride = 0;
  std::int64_t w2_expert_stride = 0;
  BiasRows gate_bias;
  BiasRows up_bias;
  BiasRows bias2;
};

}  // namespace distmoe
