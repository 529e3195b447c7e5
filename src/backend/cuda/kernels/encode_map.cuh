// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"

namespace distmoe::cuda {

/// A tensor of BF16, or FP32, and what one copy takes of it.
template <int kDims>
struct MappedTensor {
  const void* data;
  cuuint64_t dims[kDims];
  std::int64_t strides[kDims - 1];  ///< of all dimensions but the first, in elements
  cuuint32_t box[kDims];
  bool reads_ahead = true;  ///< L2 reads 256 bytes at a time, else 128
  bool is_float = false;
};

/// Its map, with 128-byte swizzle.
template <int kDims>
inline bool encode_map(EncodeTiled encode, const MappedTensor<kDims>& tensor, CUtensorMap* map) {
  const cuuint64_t element_bytes = tensor.is_float ? 4 : 2;
  cuuint64_t stride_bytes[kDims - 1];
  cuuint32_t element_strides[kDims];
  for (int i = 0; i < kDims; ++i) element_strides[i] = 1;
  for (int i = 0; i < kDims - 1; ++i) {
    stride_bytes[i] = static_cast<cuuint64_t>(tensor.strides[i]) * element_bytes;
  }
  return encode(map,
                tensor.is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                kDims, const_cast<void*>(tensor.data), tensor.dims, stride_bytes, tensor.box,
                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                tensor.reads_ahead ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                   : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace distmoe::cuda
