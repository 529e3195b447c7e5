// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
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

/// Codes and scales of a prepared matrix of every local expert; strides in bytes.
struct CodedMatrix {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const float* global_scale = nullptr;  ///< null: 1
  std::int64_t code_stride = 0;         ///< from row to row
  std::int64_t scale_stride = 0;        ///< from row to row, or from tile to tile
  std::int64_t code_expert_stride = 0;
  std::int64_t scale_expert_stride = 0;
  std::int64_t global_expert_stride = 0;  ///< in elements
};

/// The weights of a call with every layout of the public API resolved: W13 as two matrices [F, D]
/// that share a row stride, so that concatenated, interleaved and [L, 2, F, D] weights look alike.
/// All strides in elements. Where they are prepared, the coded matrices are given instead of the
/// BF16 ones.
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
  CodedMatrix coded_gate;
  CodedMatrix coded_up;
  CodedMatrix coded_w2;
};

}  // namespace distmoe
