// SPDX-License-Identifier: Apache-2.0
//
// Host side of the grouped BF16 GEMM on Hopper, see sm90_bf16_grouped_gemm.cuh for the kernel's
// contract. One kernel family does both expert products of a forward:
//   W13   h2[r, f] = swiglu(bf16(W13 x[r] + bias13))          rows gathered through addresses
//   W2    result[r, d] = bf16(W2 h2[r] + bias2)               rows scattered through addresses
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/row_table.hpp"
#include "backend/cuda/tile/gemm_storage.hpp"

namespace distmoe::cuda {

/// A bias of every local expert; null data where there is none. Strides in elements.
struct DeviceBias {
  const void* data = nullptr;
  std::int64_t expert_stride = 0;
  std::int64_t stride = 1;
  std::int32_t is_bf16 = 0;  ///< else FP32
};

/// Rows that this rank pulls from its peers while tiles of local rows run; num_pullers = 0 for
/// none.
struct GatherPull {
  const std::uint64_t* source_address = nullptr;  ///< [num_gather_rows], peer memory
  const std::int32_t* gather_index = nullptr;     ///< [R]: row of the gather buffer, -1 for local
  std::uint32_t* ready = nullptr;  ///< [ceil(gather rows / kGatherChunkRows)], epoch of the arrival
  /// On the device: where the gather buffer is; token rows' addresses point into it.
  const std::uint64_t* buffer = nullptr;
  std::int64_t buffer_stride_bytes = 0;
  std::int32_t num_pullers = 0;  ///< clusters that pull before they compute
  std::int32_t reserved = 0;
};

/// SwiGLU of W13's epilogue.
struct SwigluArgs {
  std::int32_t is_clamped = 0;
  float alpha = 1.702f;
  float limit = 7.0f;
};

/// What the host knows of a product. M is the width of a weight matrix (2F or D), K the sum's
/// length.
struct GroupedGemmArgs {
  CallFrame* frame = nullptr;
  const TileGroup* groups = nullptr;
  RowTable tokens;     ///< rows of K elements
  RowTable result;     ///< rows of F (W13) or D (W2) elements
  DeviceBias bias;     ///< gate (W13) or bias2 (W2)
  DeviceBias bias_up;  ///< W13 only
  GatherPull pull;     ///< W13 only
  SwigluArgs swiglu;
  // Training, see sm90_bf16_grad_gemm.hpp.
  const std::uint64_t* h1 = nullptr;  ///< on the device: where BF16 [R, 2F] is; 0: not kept
  std::int32_t num_score_parts = 0;   ///< lean: sums over kScorePartColumns of F
  std::uint64_t timeout_ns = 0;       ///< of the wait for pulled rows
  std::int32_t lets_next_start = 0;   ///< W13: W2 may take the SMs that it leaves
  std::int32_t others_rows = -1;      ///< a call of at most so many rows is another kernel's
  std::int32_t m = 0;                 ///< weight rows of one expert: 2F or D
  std::int32_t k = 0;                 ///< D or F; a multiple of 8
};

/// Where the two halves of W13 lie: elements between two rows of gate (or of up), from gate to up
/// of the same f, and between experts. Concatenated: {D, F * D, 2 * F * D}; interleaved: {2 * D, D,
/// 2 * F * D}. `gate` is the matrix' first element.
struct W13Layout {
  const void* gate = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t half_stride = 0;
  std::int64_t expert_stride = 0;
};

/// W2 of all local experts, strides in elements.
struct W2Layout {
  const void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t expert_stride = 0;
};

/// Of both weights of a rank.
struct WeightDims {
  std::int64_t num_experts = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
};

/// What one copy of a map's weights takes: rows of kStageK elements; and whether L2 reads the next
/// kStageK along.
struct WeightBox {
  int rows = kWeightRowsPerBlock;
  bool reads_ahead = true;
};

/// Tensor maps of the weights; `encode` is cuTensorMapEncodeTiled (cudaGetDriverEntryPoint). False
/// if the driver refuses (an address or a stride is no multiple of 16 bytes).
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
bool make_w13_map(EncodeTiled encode, const W13Layout& w13, const WeightDims& dims,
                  const WeightBox& box, CUtensorMap* map);
bool make_w2_map(EncodeTiled encode, const W2Layout& w2, const WeightDims& dims,
                 const WeightBox& box, CUtensorMap* map);

/// Loads the kernels and raises their shared memory limit; once per device, outside of captures.
cudaError_t prepare_grouped_gemm();

/// Launches on `stream`, on num_blocks blocks (even, one per SM, all resident together).
cudaError_t launch_w13_swiglu(const GroupedGemmArgs& args, const CUtensorMap& w13_map,
                              int num_blocks, cudaStream_t stream);
cudaError_t launch_w2_scatter(const GroupedGemmArgs& args, const CUtensorMap& w2_map,
                              int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
