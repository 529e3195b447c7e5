// SPDX-License-Identifier: Apache-2.0
//
// Work is cut into pieces of a row, so that even one row has all of a link's latency in parallel.
// Neighbouring pieces go to different blocks, which makes every SM's share equal to one piece.
#include "backend/cuda/kernels/copy_rows.hpp"
#include "backend/cuda/kernels/launch.cuh"
#include "backend/cuda/kernels/load_kernels.hpp"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/select/launch_shapes.hpp"
#include "backend/cuda/tile/warp_copy.cuh"

namespace distmoe::cuda {
namespace {

__global__ void __launch_bounds__(kCopyRowsThreads)
    copy_rows(const __grid_constant__ CopyRowsArgs args) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (args.frame->failed != 0) return;
  const std::int64_t num_rows =
      args.rows == CopiedRows::kGathered ? args.frame->num_gather_rows : args.frame->num_rows;
  const int pieces_per_row = (args.row_bytes + kCopyPieceBytes - 1) / kCopyPieceBytes;
  const std::int64_t num_pieces = num_rows * pieces_per_row;
  const std::int64_t step = std::int64_t{gridDim.x} * (kCopyRowsThreads / 32);
  for (std::int64_t piece = std::int64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
       piece < num_pieces; piece += step) {
    const std::int64_t row = piece / pieces_per_row;
    const int begin = static_cast<int>(piece - row * pieces_per_row) * kCopyPieceBytes;
    copy_piece(row_address(args.from, row) + begin, row_address(args.to, row) + begin,
               min(kCopyPieceBytes, args.row_bytes - begin));
  }
}

}  // namespace

cudaError_t prepare_copy_rows() { return load_kernels(copy_rows); }

cudaError_t launch_copy_rows(const CopyRowsArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_early(copy_rows, copy_rows_launch(num_blocks), stream, args);
}

}  // namespace distmoe::cuda
