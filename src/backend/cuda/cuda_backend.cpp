// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_backend.hpp"

#include <algorithm>

#include "backend/cuda/context_check.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/fault_text.hpp"
#include "backend/cuda/kernels/combine.hpp"
#include "backend/cuda/kernels/copy_rows.hpp"
#include "backend/cuda/kernels/h1_rows.hpp"
#include "backend/cuda/kernels/publish_route.hpp"
#include "backend/cuda/kernels/rank_sums.hpp"
#include "backend/cuda/kernels/route.hpp"
#include "backend/cuda/kernels/sm90_bf16_grad_gemm.hpp"
#include "backend/cuda/select/few_rows_choice.hpp"
#include "backend/cuda/select/kernel_choice.hpp"
#include "backend/cuda/select/launch_shapes.hpp"
#include "backend/cuda/stream_claims.hpp"
#include "comm/exchange.hpp"
#include "core/check.hpp"
#include "layout/context_buffers.hpp"
#include "layout/cuda_layout.hpp"
#include "plan/capacity_rows.hpp"
#include "plan/expert_partition.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe::cuda {
namespace {

static_assert(sizeof(PublishedHeader) == cuda_layout::kIdHeaderBytes);
static_assert(kNumBarriers * sizeof(std::uint32_t) == cuda_layout::kFlagBytesPerRank);
static_assert(sizeof(CallState) <= cuda_layout::kCallStateBytes);
static_assert(sizeof(CallFrame) <= cuda_layout::kCallFrameBytes);
static_assert(sizeof(TileGroup) == cuda_layout::kTileGroupBytes);

constexpr bool counts_tile_groups(std::int64_t num_ranks) {
  return max_groups_per_expert(Product::kW13, num_ranks) +
             max_groups_per_expert(Product::kW2, num_ranks) ==
         cuda_layout::tile_groups_per_expert(num_ranks);
}
static_assert(counts_tile_groups(1) && counts_tile_groups(2) && counts_tile_groups(3));
static_assert(sizeof(PeerWindows) == cuda_layout::kPeerWindowsBytes);
static_assert(kGatherChunkRows == cuda_layout::kGatherChunkRows);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  DISTMOE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                      cudaEnableDefault, &result));
  DISTMOE_CHECK(result == cudaDriverEntryPointSuccess, kUnsupported,
                "the CUDA driver is too old: it has no tensor maps (CUDA 12.0)");
  return reinterpret_cast<EncodeTiled>(function);
}

int device_sms(int device) {
  int num_sms = 0;
  DISTMOE_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  return num_sms;
}

}  // namespace

CudaBackend::CudaBackend(BackendSetup setup)
    : setup_(check_device(std::move(setup))),
      memory_(setup_.plan, symmetric_memory(setup_),
              setup_.config.host_scratch && setup_.config.host_scratch->prefetch),
      encode_(find_encode_tiled()),
      capacity_rows_(capacity_rows(setup_.config, setup_.size, setup_.plan.total_scratch_factor)),
      rows_per_rank_(static_cast<std::size_t>(setup_.size)),
      rows_per_expert_(static_cast<std::size_t>(setup_.config.num_experts)) {
  take_metadata(std::nullopt);
  DISTMOE_CUDA_CHECK(prepare_grouped_gemm());
  DISTMOE_CUDA_CHECK(prepare_few_rows());
  DISTMOE_CUDA_CHECK(prepare_route());
  DISTMOE_CUDA_CHECK(prepare_publish());
  DISTMOE_CUDA_CHECK(prepare_publish_route());
  DISTMOE_CUDA_CHECK(prepare_peer_barrier());
  DISTMOE_CUDA_CHECK(prepare_rank_sums());
  DISTMOE_CUDA_CHECK(prepare_combine());
  DISTMOE_CUDA_CHECK(prepare_copy_rows());
  DISTMOE_CUDA_CHECK(prepare_w13_saving());
  DISTMOE_CUDA_CHECK(prepare_h1_rows());
  if (!setup_.config.inference) prepare_training();
  DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
  DISTMOE_CUDA_CHECK(cudaEventCreateWithFlags(&last_call_done_, cudaEventDisableTiming));
}

CudaBackend::~CudaBackend() {
  int current = setup_.device;
  cudaGetDevice(&current);
  cudaSetDevice(setup_.device);
  cudaEventSynchronize(last_call_done_);
  leave();
  forget_stream(memory_.windows().get());
  cudaStreamSynchronize(own_stream_);
  cudaEventDestroy(last_call_done_);
  cudaStreamDestroy(own_stream_);
  cudaSetDevice(current);
}

void CudaBackend::connect() {
  const DeviceScope scope(setup_.device);
  memory_.allocate_windows();
  PeerMap peers = map_peer_windows(setup_, memory_);
  peers_windows_ = std::move(peers.held);
  choice_inputs_ = choice_inputs(setup_);
  choice_inputs_.device_sms = device_sms(setup_.device);
  choice_inputs_.ranks_on_device = peers.ranks_on_device;
  choice_ = choose_kernels(choice_inputs_);
  DISTMOE_CUDA_CHECK(cudaMemcpyAsync(
      memory_.buffer(buffer_name::kPeerWindows), peers.windows.data(),
      peers.windows.size() * sizeof(PeerWindows), cudaMemcpyHostToDevice, own_stream_));
  // NOTE: the first kernel of a stream may wait until the device is idle (H200, driver 580: the
  // first call of 4 fresh ranks on one device stood still in 11 of 541 runs, in none of 180 with
  // this launch, which computes nothing).
  DISTMOE_CUDA_CHECK(
      launch_combine({.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
                      .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame)},
                     own_stream_));
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(own_stream_));
  memory_.wait_for_host_scratch();
  is_connected_ = true;
}

std::uint64_t CudaBackend::timeout_ns() const {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(bounded(setup_.timeout)).count());
}

bool CudaBackend::combines_per_rank() const { return setup_.config.combine == Combine::kPerRank; }

void CudaBackend::send_rank_sums(const ForwardCall& call) {
  if (!combines_per_rank() || setup_.size == 1) return;
  const SumTables sums = sum_tables();
  DISTMOE_CUDA_CHECK(
      launch_rank_sums({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                        .h3 = summed_rows(call),
                        .address = sums.address,
                        .rows = sums.rows,
                        .scores = sums.scores,
                        .top_k = static_cast<std::int32_t>(setup_.config.top_k),
                        .hidden_dim = static_cast<std::int32_t>(setup_.config.hidden_dim)},
                       choice_.rank_sum_blocks, stream_of(call)));
}

RowTable CudaBackend::summed_rows(const ForwardCall& call) const {
  // The experts of an exchange return their rows as they are.
  if (call.exchanges_rows) return {.address = metadata_.token_row_address};
  return h3_rows();
}

RowTable CudaBackend::result_rows() const {
  if (combines_per_rank()) return h3_rows();
  return {.address = metadata_.result_row_address};
}

void CudaBackend::dispatch_w13_swiglu(const ForwardCall& call) {
  const DeviceScope scope(setup_.device);
  if (counts_clipped(call)) {
    DISTMOE_CUDA_CHECK(launch_begin_clip(clip_args(call), stream_of(call)));
  }
  if (num_local() > 0) {
    const std::optional<FewRowsTiles> tiles = few_rows_tiles(call);
    if (tiles) {
      DISTMOE_CUDA_CHECK(launch_few_rows(few_rows_args(call, *tiles),
                                         w13_map(call.experts, {tiles->w13_rows, false}),
                                         w2_map(call.experts, {tiles->w2_rows, false}),
                                         choice_.persistent_blocks, stream_of(call)));
      if (!launches_grouped(tiles)) return;
    }
    GroupedGemmArgs args = w13_args(call.experts);
    if (tiles) args.others_rows = most_few_rows();
    args.tokens.address = metadata_.token_row_address;
    args.pull = pull_args();
    const CUtensorMap map = w13_map(call.experts, {});
    if (counts_clipped(call)) {
      w13_with_clip_statistics(call, args, map);
    } else if (call.ticket) {
      args.h1 = &training_frame()->h1;
      DISTMOE_CUDA_CHECK(launch_w13_saving(args, map, choice_.persistent_blocks, stream_of(call)));
    } else {
      args.lets_next_start = starts_w2_early(choice_inputs_, choice_, call.num_tokens) ? 1 : 0;
      DISTMOE_CUDA_CHECK(launch_w13_swiglu(args, map, choice_.persistent_blocks, stream_of(call)));
    }
  }
  if (call.ticket) spread_x(call.x_TD, false, stream_of(call));
}

ClipArgs CudaBackend::clip_args(const ForwardCall& call) const {
  return {.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
          .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
          .training = call.ticket ? training_frame() : nullptr,
          .limit = call.clip_limit,
          .width = static_cast<std::int32_t>(setup_.config.intermediate_dim),
          .counts = call.clip_counts_3.data,
          .counts_are_float = call.clip_counts_3.dtype == DType::kF32};
}

/// The kernel that keeps h1 for a backward leaves it here to be counted.
void CudaBackend::w13_with_clip_statistics(const ForwardCall& call, GroupedGemmArgs args,
                                           const CUtensorMap& map) {
  const ClipArgs clip = clip_args(call);
  args.h1 = &clip.frame->h1;
  DISTMOE_CUDA_CHECK(launch_w13_saving(args, map, choice_.persistent_blocks, stream_of(call)));
  DISTMOE_CUDA_CHECK(launch_count_clipped(clip, row_blocks(), stream_of(call)));
}

void CudaBackend::w2_scatter(const ForwardCall& call) {
  const DeviceScope scope(setup_.device);
  const std::optional<FewRowsTiles> tiles = few_rows_tiles(call);
  if (num_local() > 0 && launches_grouped(tiles)) {
    GroupedGemmArgs args = w2_args(call.experts);
    if (tiles) args.others_rows = most_few_rows();
    args.result = result_rows();
    DISTMOE_CUDA_CHECK(launch_w2_scatter(args, w2_map(call.experts, {}), choice_.persistent_blocks,
                                         stream_of(call)));
  }
  send_rank_sums(call);
  meet_before_combine(call);
}

void CudaBackend::copy_rows(CopiedRows rows, const RowTable& from, const RowTable& to,
                            cudaStream_t stream) {
  const CopyRowsArgs args{.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                          .rows = rows,
                          .row_bytes = static_cast<std::int32_t>(setup_.config.hidden_dim * 2),
                          .from = from,
                          .to = to};
  DISTMOE_CUDA_CHECK(launch_copy_rows(args, choice_.persistent_blocks, stream));
}

void CudaBackend::dispatch_rows(const ForwardCall& call) {
  const DeviceScope scope(setup_.device);
  if (setup_.size > 1) {
    copy_rows(CopiedRows::kGathered, {.address = metadata_.gather_source},
              {.base_at = &scratch()->hidden_rows, .stride_bytes = setup_.config.hidden_dim * 2},
              stream_of(call));
  }
}

void CudaBackend::return_rows(const ForwardCall& call) {
  const DeviceScope scope(setup_.device);
  if (!combines_per_rank()) {
    copy_rows(CopiedRows::kRouted, {.address = metadata_.token_row_address}, result_rows(),
              stream_of(call));
  }
  send_rank_sums(call);
  meet_before_combine(call);
}

void CudaBackend::combine(const ForwardCall& call) {
  const DeviceScope scope(setup_.device);
  if (is_one_launch(call)) return mark_end_of_call(stream_of(call));
  const TensorView& scores = call.topk_scores_TK;
  const CombineArgs args{
      .state = memory_.buffer_of<CallState>(buffer_name::kCallState),
      .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
      .results = memory_.address(buffer_name::kCombineWindow),
      .results_at = call.ticket && setup_.size == 1 ? &training_frame()->kept_h3 : nullptr,
      .ids = published_ids(memory_.address(buffer_name::kIdWindow)),
      .scores = scores.data,
      .score_token_stride = scores.strides[0],
      .score_k_stride = scores.strides[1],
      .scores_are_bf16 = scores.dtype == DType::kBF16,
      .num_tokens = static_cast<std::int32_t>(call.num_tokens),
      .top_k = static_cast<std::int32_t>(setup_.config.top_k),
      .hidden_dim = static_cast<std::int32_t>(setup_.config.hidden_dim),
      .y = address_of(call.y_TD),
      .y_stride_bytes = row_stride_bytes(call.y_TD),
      .norm = norm_args(call.norm),
      .row_of_route = sum_tables().row_of_route,
      .h3 = summed_rows(call),
      .sums_per_token = static_cast<std::int32_t>(cuda_sums_per_token(setup_.config, setup_.size)),
      .num_experts = static_cast<std::int32_t>(setup_.config.num_experts),
      .num_ranks = setup_.size,
      .rank = setup_.rank,
      .meeting = barrier_args(PeerBarrier::kResultsStored),
      .meets_peers = joins_meeting_and_combine(call) ? 1 : 0};
  DISTMOE_CUDA_CHECK(launch_combine(args, stream_of(call)));
  if (call.ticket && setup_.size > 1) keep_h3(call);
  if (counts_clipped(call)) {
    DISTMOE_CUDA_CHECK(launch_write_clip(clip_args(call), stream_of(call)));
  }
  mark_end_of_call(stream_of(call));
}

void CudaBackend::mark_end_of_call(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  DISTMOE_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) {
    DISTMOE_CUDA_CHECK(cudaEventRecord(last_call_done_, stream));
  }
  call_in_progress_.reset();
}

void CudaBackend::wait_for_calls() { DISTMOE_CUDA_CHECK(cudaEventSynchronize(last_call_done_)); }

void CudaBackend::copy_from_device(void* out, const void* source, std::size_t bytes) {
  DISTMOE_CUDA_CHECK(cudaMemcpyAsync(out, source, bytes, cudaMemcpyDeviceToHost, own_stream_));
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(own_stream_));
}

void CudaBackend::check_stream(std::int64_t call, void* stream) {
  if (stream == nullptr) return;
  const auto handle = static_cast<cudaStream_t>(stream);
  const bool is_default = handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  int device = setup_.device;
  // NOTE: to ask for a stream's device would end a capture of it.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
  if (!is_default && cudaStreamIsCapturing(handle, &capture) == cudaSuccess &&
      capture == cudaStreamCaptureStatusNone) {
    DISTMOE_CUDA_CHECK(cudaStreamGetDevice(handle, &device));
  }
  DISTMOE_CHECK(device == setup_.device, kInvalidArgument, "options.stream is of CUDA device ",
                device, "; this context's is ", setup_.device);
  // Every thread has a cudaStreamPerThread of its own.
  if (handle == cudaStreamPerThread) return;
  const bool is_free = claim_stream(
      {.windows = memory_.windows().get(), .device = setup_.device, .stream = stream, .call = call},
      peers_windows_);
  DISTMOE_CHECK(is_free, kInvalidArgument, "options.stream is also that of a peer on CUDA device ",
                setup_.device,
                ", whose kernels would wait for kernels behind them; ranks that "
                "share a device need a stream each, or null for one of the context's own");
}

void CudaBackend::check() {
  const DeviceScope scope(setup_.device);
  auto* state = memory_.buffer_of<CallState>(buffer_name::kCallState);
  const CallState copy = read_state();
  if (copy.first_fault.kind == FaultKind::kNone) return;
  DISTMOE_CUDA_CHECK(
      cudaMemsetAsync(&state->first_fault, 0, sizeof(state->first_fault), own_stream_));
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(own_stream_));
  throw_fault(copy.first_fault, copy.first_fault_call, setup_);
}

CallState CudaBackend::read_state() {
  wait_for_calls();
  CallState state{};
  copy_from_device(&state, memory_.buffer(buffer_name::kCallState), sizeof(state));
  return state;
}

RoutingLoad CudaBackend::load() {
  const DeviceScope scope(setup_.device);
  wait_for_calls();
  const auto fetch = [&](const std::int64_t* source, std::vector<std::int64_t>& out) {
    copy_from_device(out.data(), source, out.size() * sizeof(std::int64_t));
  };
  CallFrame frame{};
  copy_from_device(&frame, memory_.buffer(buffer_name::kCallFrame), sizeof(frame));
  if (frame.failed != 0) return {};
  fetch(metadata_.rows_per_rank, rows_per_rank_);
  fetch(metadata_.rows_per_expert, rows_per_expert_);
  TrainingFrame training{};
  if (ticket_) copy_from_device(&training, training_frame(), sizeof(training));
  return {rows_per_rank_, rows_per_expert_, training.is_recomputed != 0,
          scratch_bytes(scratch_limits(), frame.num_rows)};
}

std::unique_ptr<Backend> make_backend(BackendSetup setup) {
  const DeviceScope callers;
  return std::make_unique<CudaBackend>(std::move(setup));
}

}  // namespace distmoe::cuda
