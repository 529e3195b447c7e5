// SPDX-License-Identifier: Apache-2.0
//
// The head of a call and its meetings with peers: what is published, routed and waited for, and
// which of it one launch makes.
#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/kernels/publish_route.hpp"
#include "backend/cuda/select/launch_shapes.hpp"
#include "comm/agreement.hpp"
#include "layout/context_buffers.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {

bool CudaBackend::joins_publish_and_route() const {
  return !order_peers_ && cuda::joins_publish_and_route(choice_inputs_, setup_.config.max_tokens);
}

bool CudaBackend::joins_meeting_and_combine(const ForwardCall& call) const {
  return !order_peers_ && cuda::joins_meeting_and_combine(choice_inputs_, choice_, call.num_tokens);
}

void CudaBackend::meet_before_combine(const ForwardCall& call) {
  if (!joins_meeting_and_combine(call)) {
    meet_peers(PeerBarrier::kResultsStored, stream_of(call));
  }
}

PublishArgs CudaBackend::publish_args(const ForwardCall& call) const {
  return {.head = {.call = call.index, .rank = setup_.rank},
          .state = memory_.buffer_of<CallState>(buffer_name::kCallState),
          .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
          .ids_window = memory_.address(buffer_name::kIdWindow),
          .x_window = memory_.address(buffer_name::kDispatchWindow),
          .x = address_of(call.x_TD),
          .x_stride_bytes = row_stride_bytes(call.x_TD),
          .ids = call.topk_ids_TK.data,
          .id_token_stride = call.topk_ids_TK.strides[0],
          .id_k_stride = call.topk_ids_TK.strides[1],
          .scores = call.topk_scores_TK.data,
          .score_token_stride = call.topk_scores_TK.strides[0],
          .score_k_stride = call.topk_scores_TK.strides[1],
          .scores_window = score_window(),
          .scores_are_bf16 = call.topk_scores_TK.dtype == DType::kBF16,
          .ids_are_64_bit = call.topk_ids_TK.dtype == DType::kI64,
          .num_tokens = static_cast<std::int32_t>(call.num_tokens),
          .top_k = static_cast<std::int32_t>(setup_.config.top_k),
          .num_experts = static_cast<std::int32_t>(setup_.config.num_experts),
          .row_bytes = static_cast<std::int32_t>(setup_.config.hidden_dim * 2)};
}

void CudaBackend::publish(const ForwardCall& call, const std::optional<Error>& refusal) {
  const cudaStream_t stream = stream_of(call);
  call_in_progress_ = stream;
  take_metadata(call.ticket);
  if (!refusal && (is_one_launch(call) || joins_publish_and_route())) return;
  const DeviceScope scope(setup_.device);
  if (refusal) follow_last_call(stream);
  PublishArgs args = publish_args(call);
  if (refusal) args.head.refusal = static_cast<std::int32_t>(refusal->code());
  DISTMOE_CUDA_CHECK(launch_publish(args, choice_.publish_blocks, stream));
  meet_peers(PeerBarrier::kPublished, stream);
  if (refusal) end_refused_call(*refusal, stream);
}

void CudaBackend::end_refused_call(const Error& refusal, cudaStream_t stream) {
  meet_peers(PeerBarrier::kResultsStored, stream);
  DISTMOE_CUDA_CHECK(
      launch_keep_loss(memory_.buffer_of<CallState>(buffer_name::kCallState), stream));
  mark_end_of_call(stream);
  throw AgreedError(refusal.code(), refusal.what());
}

void CudaBackend::follow_last_call(cudaStream_t stream) const {
  if (stream == own_stream_) DISTMOE_CUDA_CHECK(cudaStreamWaitEvent(stream, last_call_done_));
}

RouteArgs CudaBackend::route_args(const ForwardCall& call) const {
  return {.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
          .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
          .groups = memory_.buffer_of<TileGroup>(buffer_name::kTileGroups),
          .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
          .chunk_counts = memory_.buffer_of<std::int32_t>(buffer_name::kChunkCounts),
          .chunk_tokens = memory_.buffer_of<std::int32_t>(buffer_name::kChunkTokens),
          .expert_begin = metadata_.expert_begin,
          .rows_per_rank = metadata_.rows_per_rank,
          .rows_per_expert = metadata_.rows_per_expert,
          .row_origin = metadata_.row_origin,
          .token_row_address = metadata_.token_row_address,
          .gather_index = metadata_.gather_index,
          .result_row_address = metadata_.result_row_address,
          .gather_source = metadata_.gather_source,
          .sums = sum_tables(),
          .x = address_of(call.x_TD),
          .x_stride_bytes = row_stride_bytes(call.x_TD),
          .scratch = scratch_limits(),
          .row_bytes = setup_.config.hidden_dim * 2,
          .capacity_rows = capacity_rows_,
          .gather_rows = gather_rows(),
          .rank = setup_.rank,
          .num_ranks = setup_.size,
          .top_k = static_cast<std::int32_t>(setup_.config.top_k),
          .num_experts = static_cast<std::int32_t>(setup_.config.num_experts),
          .first_local_expert = static_cast<std::int32_t>(
              first_expert(setup_.config.num_experts, setup_.size, setup_.rank)),
          .num_local_experts = static_cast<std::int32_t>(num_local()),
          .chunks_per_rank =
              static_cast<std::int32_t>(route_chunks_per_rank(setup_.config.max_tokens))};
}

std::int64_t CudaBackend::gather_rows() const {
  return cuda_gather_rows(setup_.config, setup_.size, capacity_rows_);
}

void CudaBackend::route(const ForwardCall& call) {
  if (is_one_launch(call)) return;
  const DeviceScope scope(setup_.device);
  if (!joins_publish_and_route()) {
    DISTMOE_CUDA_CHECK(launch_route(route_args(call), stream_of(call)));
    return;
  }
  const PublishRouteArgs args{.publish = publish_args(call),
                              .meeting = barrier_args(PeerBarrier::kPublished),
                              .route = route_args(call),
                              .max_tokens = static_cast<std::int32_t>(setup_.config.max_tokens)};
  DISTMOE_CUDA_CHECK(launch_publish_route(args, choice_.publish_blocks, stream_of(call)));
}

std::uint64_t CudaBackend::score_window() const {
  if (!combines_per_rank() || setup_.size == 1) return 0;
  return memory_.address(buffer_name::kIdWindow) +
         static_cast<std::uint64_t>(cuda_score_offset(setup_.config));
}

SumTables CudaBackend::sum_tables() const {
  if (!combines_per_rank()) return {};
  const std::int64_t row_bytes =
      setup_.config.hidden_dim * static_cast<std::int64_t>(sizeof(float));
  return {.row_of_route = memory_.buffer_of<std::int32_t>(buffer_name::kRowOfRoute),
          .address = memory_.buffer_of<std::uint64_t>(buffer_name::kSumAddress),
          .rows = memory_.buffer_of<std::int32_t>(buffer_name::kSumRows),
          .scores = memory_.buffer_of<float>(buffer_name::kSumScores),
          .score_offset = cuda_score_offset(setup_.config),
          .bytes_per_token = cuda_sums_per_token(setup_.config, setup_.size) * row_bytes,
          .row_bytes = row_bytes};
}

}  // namespace distmoe::cuda
