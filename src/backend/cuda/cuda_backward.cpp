// SPDX-License-Identifier: Apache-2.0
//
// The steps of a backward. A layer that recomputes runs the same launches as one that was saved:
// what the device does not need it skips.
//
// grad_h3 takes the place of the hidden rows of scratch (scratch_place.hpp): those gathered of x
// and then h3, of a layer that is computed again.
#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "backend/cuda/kernels/bias_gradient.hpp"
#include "backend/cuda/kernels/grad_dispatch.hpp"
#include "backend/cuda/kernels/grad_reduce.hpp"
#include "backend/cuda/kernels/h1_rows.hpp"
#include "backend/cuda/kernels/sm90_bf16_grad_gemm.hpp"
#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "layout/context_buffers.hpp"

namespace distmoe::cuda {

/// Of this rank, where its peers find them.
float* CudaBackend::published_scores() const {
  return reinterpret_cast<float*>(memory_.buffer(buffer_name::kIdWindow) +
                                  cuda_score_offset(setup_.config));
}

void CudaBackend::publish_backward(const BackwardCall& call, const std::optional<Error>& refusal) {
  const DeviceScope scope(setup_.device);
  const cudaStream_t stream = stream_of(call);
  backward_stream_ = stream;
  call_in_progress_ = stream;
  if (refusal || !call.ticket) {
    follow_last_call(stream);
    const Error reason =
        refusal.value_or(Error(ErrorCode::kInternal, "a backward without a forward"));
    const SlotArgs refused{.head = {.call = call.index,
                                    .rank = setup_.rank,
                                    .refusal = static_cast<std::int32_t>(reason.code())},
                           .state = memory_.buffer_of<CallState>(buffer_name::kCallState),
                           .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                           .training = training_frame(),
                           .ids_window = memory_.address(buffer_name::kIdWindow)};
    DISTMOE_CUDA_CHECK(launch_begin_backward(refused, stream));
    meet_peers(PeerBarrier::kPublished, stream);
    end_refused_call(reason, stream);
  }
  take_metadata(call.ticket);
  SlotArgs args = slot_args(*call.ticket);
  args.head = {.call = call.index, .rank = setup_.rank};
  args.num_tokens = call.num_tokens;
  DISTMOE_CUDA_CHECK(launch_begin_backward(args, stream));
  if (setup_.size == 1) return;
  const std::uint64_t x_window = memory_.address(buffer_name::kDispatchWindow);
  DISTMOE_CUDA_CHECK(launch_publish_grad(
      {.frame = args.frame,
       .training = training_frame(),
       .dy = address_of(call.dy_TD),
       .dy_stride_bytes = row_stride_bytes(call.dy_TD),
       .dy_window = x_window + static_cast<std::uint64_t>(cuda_dy_offset(setup_.config)),
       .x_window = x_window,
       .scores = metadata_.scores,
       .score_window = published_scores(),
       .row_bytes = setup_.config.hidden_dim * 2,
       .num_tokens = static_cast<std::int32_t>(call.num_tokens),
       .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
      row_blocks(), stream));
  meet_peers(PeerBarrier::kPublished, stream);
}

/// All products of a backward take the rows of an expert together.
GroupedGemmArgs CudaBackend::backward_args(Product product) const {
  GroupedGemmArgs args = product_args(product);
  args.groups = product_args(Product::kW2).groups;
  return args;
}

void CudaBackend::carve_backward(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  auto* frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame);
  DISTMOE_CUDA_CHECK(launch_list_groups(
      {.frame = frame,
       .training = training_frame(),
       .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
       .expert_begin = metadata_.expert_begin,
       .groups = groups_of(memory_.buffer_of<TileGroup>(buffer_name::kTileGroups), Product::kW2,
                           num_local(), setup_.size),
       .num_experts = static_cast<std::int32_t>(num_local()),
       .num_ranks = setup_.size,
       .is_normed = call.norm ? 1 : 0},
      stream_of(call)));
  DISTMOE_CUDA_CHECK(launch_list_rows(
      {.frame = frame,
       .training = training_frame(),
       .rows = token_rows(),
       .row_origin = metadata_.row_origin,
       .gather_index = metadata_.gather_index,
       .token_row_address = metadata_.token_row_address,
       .result_row_address =
           setup_.size == 1 || combines_per_rank() ? metadata_.result_row_address : nullptr,
       .results = memory_.address(buffer_name::kCombineWindow),
       .windows = combines_per_rank() ? memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows)
                                      : nullptr,
       .row_bytes = setup_.config.hidden_dim * 2,
       .limits = route_limits(),
       .is_backward = 1,
       .rank = setup_.rank,
       .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
      row_blocks(), stream_of(call)));
}

void CudaBackend::restore_activations(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  const cudaStream_t stream = stream_of(call);
  if (num_local() > 0) {
    GroupedGemmArgs args = w13_args(call.experts);
    args.tokens.address = metadata_.token_row_address;
    args.pull = pull_args();
    args.groups = backward_args(Product::kW13).groups;
    args.h1 = &training_frame()->h1;
    DISTMOE_CUDA_CHECK(
        launch_w13_saving(args, w13_map(call.experts, {}), choice_.persistent_blocks, stream));
  }
  const TensorView kept_x{nullptr, DType::kBF16, {call.num_tokens, setup_.config.hidden_dim}};
  spread_x(kept_x, true, stream);
  // A lean layer has no h3.
  if (num_local() == 0 || is_lean()) return;
  if (call.norm && setup_.size > 1) {
    DISTMOE_CUDA_CHECK(
        launch_restore_h2({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                           .training = training_frame(),
                           .swiglu = product_args(Product::kW2).swiglu,
                           .width = static_cast<std::int32_t>(setup_.config.intermediate_dim)},
                          row_blocks(), stream));
  }
  GroupedGemmArgs args = w2_args(call.experts);
  args.result = h3_rows();
  DISTMOE_CUDA_CHECK(
      launch_w2_scatter(args, w2_map(call.experts, {}), choice_.persistent_blocks, stream));
}

/// Of scores in an id window; 0 where there are no peers.
std::int64_t CudaBackend::score_offset() const {
  return setup_.size > 1 ? cuda_score_offset(setup_.config) : 0;
}

void CudaBackend::dispatch_grad_h3(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  DISTMOE_CUDA_CHECK(
      launch_grad_h3({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                      .training = training_frame(),
                      .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
                      .row_origin = metadata_.row_origin,
                      .rows = token_rows(),
                      .dy = address_of(call.dy_TD),
                      .dy_stride_bytes = row_stride_bytes(call.dy_TD),
                      .dy_offset = cuda_dy_offset(setup_.config),
                      .score_offset = score_offset(),
                      .scores = metadata_.scores,
                      .norm = norm_args(call.norm),
                      .is_lean = is_lean() ? 1 : 0,
                      .row_bytes = setup_.config.hidden_dim * 2,
                      .num_tokens = static_cast<std::int32_t>(call.num_tokens),
                      .top_k = static_cast<std::int32_t>(setup_.config.top_k),
                      .rank = setup_.rank},
                     row_blocks(), stream_of(call)));
}

void CudaBackend::w2_dgrad(const BackwardCall& call) {
  if (num_local() == 0) return;
  const DeviceScope scope(setup_.device);
  const Config& config = setup_.config;
  GroupedGemmArgs args = backward_args(Product::kW2Dgrad);
  args.tokens = h3_rows();
  args.result = h2_rows();
  args.h1 = &training_frame()->h1;
  args.m = static_cast<std::int32_t>(config.intermediate_dim);
  args.k = static_cast<std::int32_t>(config.hidden_dim);
  CUtensorMap map;
  DISTMOE_CHECK(make_w2_transposed_map(encode_, w2_layout(call.experts), weight_dims(), &map),
                kInternal, "no tensor map for w2");
  if (!is_lean()) {
    DISTMOE_CUDA_CHECK(launch_w2_dgrad(args, map, choice_.persistent_blocks, stream_of(call)));
    return;
  }
  args.num_score_parts = static_cast<std::int32_t>(num_score_parts(setup_.config.intermediate_dim));
  DISTMOE_CUDA_CHECK(launch_w2_lean_dgrad(args, map, choice_.persistent_blocks, stream_of(call)));
  finish_lean_scores(call);
}

void CudaBackend::finish_lean_scores(const BackwardCall& call) {
  DISTMOE_CUDA_CHECK(launch_lean_scores(
      {.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
       .windows = memory_.buffer_of<PeerWindows>(buffer_name::kPeerWindows),
       .row_origin = metadata_.row_origin,
       .expert_begin = metadata_.expert_begin,
       .bias2 = device_bias(call.experts.bias2),
       .score_offset = score_offset(),
       .scores = metadata_.scores,
       .row_bytes = setup_.config.hidden_dim * 2,
       .limits = route_limits(),
       .num_score_parts =
           static_cast<std::int32_t>(num_score_parts(setup_.config.intermediate_dim)),
       .num_experts = static_cast<std::int32_t>(num_local()),
       .top_k = static_cast<std::int32_t>(setup_.config.top_k)},
      row_blocks(), stream_of(call)));
}

namespace {

WeightGradient device_gradient(const GradientDestination& out, std::int64_t interleaved_rows) {
  return {.data = out.data,
          .is_float = out.dtype == DType::kF32,
          .accumulates = out.accumulates ? 1 : 0,
          .interleaved_rows = static_cast<std::int32_t>(interleaved_rows)};
}

}  // namespace

/// `args` says where the operands are and how wide; the rest is filled in here.
void CudaBackend::add_weight_gradient(const BackwardCall& call, const GradientDestination& out,
                                      WgradArgs args) const {
  if (out.data == nullptr || num_local() == 0) return;
  args.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame);
  args.expert_begin = metadata_.expert_begin;
  args.buffer = activations_at(0);
  args.out = device_gradient(out, args.out.interleaved_rows);
  args.num_experts = static_cast<std::int32_t>(num_local());
  WgradMaps maps{};
  const bool is_made = make_wgrad_maps(
      encode_, {memory_.activations(), memory_.activation_bytes(), capacity_rows_}, args, &maps);
  DISTMOE_CHECK(is_made, kInternal, "no tensor map for a weight's gradient");
  DISTMOE_CUDA_CHECK(launch_wgrad(args, maps, choice_.persistent_blocks, stream_of(call)));
}

void CudaBackend::add_bias_gradient(const BackwardCall& call, const GradientDestination& out,
                                    const std::uint64_t* grads, std::int64_t width,
                                    std::int64_t half) const {
  if (out.data == nullptr) return;
  DISTMOE_CUDA_CHECK(
      launch_bias_gradient({.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                            .expert_begin = metadata_.expert_begin,
                            .grads = grads,
                            .out = device_gradient(out, half),
                            .num_experts = static_cast<std::int32_t>(num_local()),
                            .width = static_cast<std::int32_t>(width)},
                           stream_of(call)));
}

void CudaBackend::w2_wgrad(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  const Config& config = setup_.config;
  add_weight_gradient(call, call.grad_w2_LDF,
                      {.grads = &scratch()->hidden_rows,
                       .activations = &scratch()->h2,
                       .m = static_cast<std::int32_t>(config.hidden_dim),
                       .n = static_cast<std::int32_t>(config.intermediate_dim)});
  add_bias_gradient(call, call.grad_bias2_LD, &scratch()->hidden_rows, config.hidden_dim, 0);
}

void CudaBackend::w13_wgrad(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  const Config& config = setup_.config;
  const std::int64_t half =
      config.gate_up_layout == GateUpLayout::kInterleaved ? config.intermediate_dim : 0;
  add_weight_gradient(call, call.grad_w13_L2FD,
                      {.grads = &scratch()->h1,
                       .activations = &training_frame()->x,
                       .out = {.interleaved_rows = static_cast<std::int32_t>(half)},
                       .m = static_cast<std::int32_t>(2 * config.intermediate_dim),
                       .n = static_cast<std::int32_t>(config.hidden_dim)});
  add_bias_gradient(call, call.grad_bias13_L2F, &scratch()->h1, 2 * config.intermediate_dim, half);
}

void CudaBackend::w13_dgrad_scatter(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  const Config& config = setup_.config;
  if (num_local() > 0) {
    GroupedGemmArgs args = backward_args(Product::kW13Dgrad);
    args.tokens = {.base_at = &scratch()->h1, .stride_bytes = 4 * config.intermediate_dim};
    args.result = {.address = metadata_.result_row_address};
    args.m = static_cast<std::int32_t>(config.hidden_dim);
    args.k = static_cast<std::int32_t>(config.intermediate_dim);
    CUtensorMap map;
    DISTMOE_CHECK(make_w13_transposed_map(encode_, w13_layout(call.experts), weight_dims(), &map),
                  kInternal, "no tensor map for w13");
    DISTMOE_CUDA_CHECK(launch_w13_dgrad(args, map, choice_.persistent_blocks, stream_of(call)));
  }
  meet_peers(PeerBarrier::kResultsStored, stream_of(call));
}

void CudaBackend::reduce_gradients(const BackwardCall& call) {
  const DeviceScope scope(setup_.device);
  const TensorView& grad_x = call.grad_x_TD;
  const TensorView& grad_scores = call.grad_scores_TK;
  const float* score_grads = metadata_.scores;
  if (setup_.size > 1) {
    score_grads = published_scores();
  }
  DISTMOE_CUDA_CHECK(launch_grad_reduce(
      {.state = memory_.buffer_of<CallState>(buffer_name::kCallState),
       .frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
       .training = training_frame(),
       .route_grads = memory_.address(buffer_name::kCombineWindow),
       .ids = metadata_.ids,
       .score_grads = score_grads,
       .dy = address_of(call.dy_TD),
       .dy_stride_bytes = row_stride_bytes(call.dy_TD),
       .grad_x = grad_x.is_given() ? address_of(grad_x) : 0,
       .grad_x_stride_bytes = grad_x.is_given() ? row_stride_bytes(grad_x) : 0,
       .grad_scores = grad_scores.is_given() ? grad_scores.data : nullptr,
       .grad_scores_are_bf16 = grad_scores.is_given() && grad_scores.dtype == DType::kBF16,
       .is_normed = call.norm ? 1 : 0,
       .num_tokens = static_cast<std::int32_t>(call.num_tokens),
       .top_k = static_cast<std::int32_t>(setup_.config.top_k),
       .hidden_dim = static_cast<std::int32_t>(setup_.config.hidden_dim)},
      stream_of(call)));
}

}  // namespace distmoe::cuda
