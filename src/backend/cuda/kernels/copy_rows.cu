// SPDX-License-Identifier: Apache-2.0
//
// Work is cut into pieces of a row, so that even one row has all of a link's latency in parallel.
// Neighbouring pieces go to different blocks, which makes every SM's share equal to one piece.
#include "backend/cuda/kernels/copy_rows.hpp"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kLaneBytes = 16;
constexpr int kInFlight = 8;  ///< loads of a thread
constexpr int kStepBytes = 32 * kLaneBytes;
constexpr int kPieceBytes = kInFlight * kStepBytes;

/// Copies up to kPieceBytes with all lanes of a warp.
__device__ __forceinline__ void copy_piece(std::uint64_t from, std::uint64_t to, int bytes) {
  const int lane_begin = static_cast<int>(threadIdx.x % 32) * kLaneBytes;
  uint4 values[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int at = lane_begin + i * kStepBytes;
    if (at < bytes) values[i] = __ldcg(reinterpret_cast<const uint4*>(from + at));
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int at = lane_begin + i * kStepBytes;
    if (at < bytes) __stcg(reinterpret_cast<uint4*>(to + at), values[i]);
  }
}

__global__ void __launch_bounds__(kCopyRowsThreads)
    copy_rows(const __grid_constant__ CopyRowsArgs args) {
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const std::int64_t num_rows =
      args.rows == CopiedRows::kGathered ? args.frame->num_gather_rows : args.frame->num_rows;
  const int pieces_per_row = (args.row_bytes + kPieceBytes - 1) / kPieceBytes;
  const std::int64_t num_pieces = num_rows * pieces_per_row;
  const std::int64_t step = std::int64_t{gridDim.x} * (kCopyRowsThreads / 32);
  for (std::int64_t piece = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
       piece < num_pieces; piece += step) {
    const std::int64_t row = piece / pieces_per_row;
    const int begin = static_cast<int>(piece - row * pieces_per_row) * kPieceBytes;
    copy_piece(row_address(args.from, row) + begin, row_address(args.to, row) + begin,
               min(kPieceBytes, args.row_bytes - begin));
  }
}

}  // namespace

cudaError_t prepare_copy_rows() { return load_kernels(copy_rows); }

cudaError_t launch_copy_rows(const CopyRowsArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_early(copy_rows, copy_rows_launch(num_blocks), stream, args);
}

}  // namespace distmoe::cuda
