// SPDX-License-Identifier: Apache-2.0
//
// The dispatch of a backward: dy and scores go to the ranks of the experts, a token's dy once to
// each, and become grad_h3 of every row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/kernels/norm_args.hpp"
#include "backend/cuda/kernels/sm90_bf16_grouped_gemm.hpp"
#include "backend/cuda/kernels/training_rows.hpp"
#include "backend/cuda/published.hpp"
#include "backend/cuda/training_frame.hpp"

namespace distmoe::cuda {

struct PublishGradArgs {
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  std::uint64_t dy = 0;  ///< BF16 [T, D]
  std::int64_t dy_stride_bytes = 0;
  std::uint64_t dy_window = 0;
  std::uint64_t x_window = 0;  ///< takes kept_x, where the layer is computed again
  const float* scores = nullptr;
  float* score_window = nullptr;
  std::int64_t row_bytes = 0;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
};

struct ListGroupsArgs {
  CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  const PeerWindows* windows = nullptr;        ///< [P]
  const std::int32_t* expert_begin = nullptr;  ///< [L + 1]
  TileGroup* groups = nullptr;                 ///< [L]
  std::int32_t num_experts = 0;                ///< L
  std::int32_t num_ranks = 1;
  std::int32_t is_normed = 0;
};

struct GradH3Args {
  const CallFrame* frame = nullptr;
  const TrainingFrame* training = nullptr;
  const PeerWindows* windows = nullptr;   ///< [P]
  const RowOrigin* row_origin = nullptr;  ///< [R]
  TokenRows rows;
  std::uint64_t dy = 0;  ///< of this rank's own tokens
  std::int64_t dy_stride_bytes = 0;
  std::int64_t dy_offset = 0;     ///< of dy in a dispatch window
  std::int64_t score_offset = 0;  ///< of scores in an id window; 0: a single rank, `scores` is used
  float* scores = nullptr;        ///< [T, K]
  NormArgs norm{};
  std::int32_t is_lean = 0;  ///< grad_h3 becomes dy, and the row's score is kept, see LeanScores
  std::int64_t row_bytes = 0;
  std::int32_t num_tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t rank = 0;
};

/// The end of a lean W2 DGRAD.
struct LeanScoreArgs {
  const CallFrame* frame = nullptr;
  const PeerWindows* windows = nullptr;        ///< [P]
  const RowOrigin* row_origin = nullptr;       ///< [R]
  const std::int32_t* expert_begin = nullptr;  ///< [L + 1]
  DeviceBias bias2{};
  std::int64_t score_offset = 0;  ///< as in GradH3Args
  float* scores = nullptr;
  std::int64_t row_bytes = 0;
  RouteLimits limits;
  std::int32_t num_score_parts = 0;
  std::int32_t num_experts = 0;  ///< L
  std::int32_t top_k = 0;
};

/// Loads the kernels and lets them use the shared memory of a row; once, outside of captures.
cudaError_t prepare_grad_dispatch();
/// Whether a row fits where a block keeps it.
bool fits_grad_dispatch(std::int64_t row_bytes);

/// Call before the barrier PeerBarrier::kPublished, where there are peers.
cudaError_t launch_publish_grad(const PublishGradArgs& args, int num_blocks, cudaStream_t stream);
/// One group an expert, for every product of the backward; finds refusals of peers. W13 and W2 have
/// none where the slot kept what they make; a norm needs h3 of peers' routes, and so W2.
cudaError_t launch_list_groups(const ListGroupsArgs& args, cudaStream_t stream);
/// Scratch's grad_h3[r] = bf16(dy[token of r] * score of r). Where h3 lies in that place first, the
/// score is replaced by its gradient sum_d h3 dy. With a norm grad_h3 is taken back through it,
/// from that h3 or, of this rank's own routes, from what the slot keeps, and the score always
/// replaced.
cudaError_t launch_grad_h3(const GradH3Args& args, int num_blocks, cudaStream_t stream);
/// The score's gradient, sum of its parts + sum_d dy bias2, takes the score's place, then
/// grad_h3 = bf16(dy * score).
cudaError_t launch_lean_scores(const LeanScoreArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace distmoe::cuda
