// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"

namespace distmoe::cuda {

/// A map of BF16, or FP32, with 128-byte swizzle; strides of all dimensions but the first, in
/// elements.
template <int kDims>
inline bool encode_map(EncodeTiled encode, const void* data, const cuuint64_t (&dims)[kDims],
                       const std::int64_t (&strides)[kDims - 1], const cuuint32_t (&box)[kDims],
                       bool reads_ahead, CUtensorMap* map, bool is_float = false) {
  const cuuint64_t element_bytes = is_float ? 4 : 2;
  cuuint64_t stride_bytes[kDims - 1];
  cuuint32_t element_strides[kDims];
  for (int i = 0; i < kDims; ++i) element_strides[i] = 1;
  for (int i = 0; i < kDims - 1; ++i) {
    stride_bytes[i] = static_cast<cuuint64_t>(strides[i]) * element_bytes;
  }
  return encode(
             map, is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kDims, const_cast<void*>(data), dims, stride_bytes, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             reads_ahead ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace distmoe::cuda
