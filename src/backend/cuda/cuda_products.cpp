// SPDX-License-Identifier: Apache-2.0
//
// What the expert products of a call are made of: sizes, biases, tensor maps of the weights, and
// the arguments of the kernel that makes a call of few rows at once.
#include <algorithm>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/select/few_rows_choice.hpp"
#include "core/check.hpp"
#include "layout/context_buffers.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {
namespace {

/// A tensor map wants a stride even where there is one expert. Experts may share weights: 0.
std::int64_t expert_stride(std::int64_t num_experts, std::int64_t stride, std::int64_t row_stride,
                           std::int64_t num_rows) {
  return num_experts > 1 ? stride : row_stride * num_rows;
}

}  // namespace

GroupedGemmArgs CudaBackend::product_args(Product product) const {
  GroupedGemmArgs args;
  args.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame);
  args.groups = groups_of(memory_.buffer_of<TileGroup>(buffer_name::kTileGroups), product,
                          num_local(), setup_.size);
  args.timeout_ns = timeout_ns();
  args.swiglu = {.is_clamped = setup_.config.activation == Activation::kSwiGLUClamped,
                 .alpha = static_cast<float>(setup_.config.swiglu_alpha),
                 .limit = static_cast<float>(setup_.config.swiglu_limit)};
  return args;
}

RowTable CudaBackend::h2_rows() const {
  return {.base_at = &scratch()->h2, .stride_bytes = setup_.config.intermediate_dim * 2};
}

RowTable CudaBackend::h3_rows() const {
  return {.base_at = &scratch()->hidden_rows, .stride_bytes = setup_.config.hidden_dim * 2};
}

std::int64_t CudaBackend::num_local() const {
  return num_local_experts(setup_.config.num_experts, setup_.size, setup_.rank);
}

WeightDims CudaBackend::weight_dims() const {
  return {num_local(), setup_.config.hidden_dim, setup_.config.intermediate_dim};
}

GroupedGemmArgs CudaBackend::w13_args(const ExpertMatrices& experts) const {
  GroupedGemmArgs args = product_args(Product::kW13);
  args.result = h2_rows();
  args.bias = device_bias(experts.gate_bias);
  args.bias_up = device_bias(experts.up_bias);
  args.m = static_cast<std::int32_t>(2 * setup_.config.intermediate_dim);
  args.k = static_cast<std::int32_t>(setup_.config.hidden_dim);
  return args;
}

W13Layout CudaBackend::w13_layout(const ExpertMatrices& experts) const {
  return {
      .gate = experts.gate,
      .row_stride = experts.w13_row_stride,
      .half_stride = experts.up - experts.gate,
      .expert_stride = expert_stride(num_local(), experts.w13_expert_stride, experts.w13_row_stride,
                                     2 * setup_.config.intermediate_dim)};
}

CUtensorMap CudaBackend::w13_map(const ExpertMatrices& experts, const WeightBox& box) const {
  CUtensorMap map;
  DISTMOE_CHECK(make_w13_map(encode_, w13_layout(experts), weight_dims(), box, &map), kInternal,
                "no tensor map for w13");
  return map;
}

GroupedGemmArgs CudaBackend::w2_args(const ExpertMatrices& experts) const {
  GroupedGemmArgs args = product_args(Product::kW2);
  args.tokens = h2_rows();
  args.bias = device_bias(experts.bias2);
  args.m = static_cast<std::int32_t>(setup_.config.hidden_dim);
  args.k = static_cast<std::int32_t>(setup_.config.intermediate_dim);
  return args;
}

W2Layout CudaBackend::w2_layout(const ExpertMatrices& experts) const {
  return {.data = experts.w2,
          .row_stride = experts.w2_row_stride,
          .expert_stride = expert_stride(num_local(), experts.w2_expert_stride,
                                         experts.w2_row_stride, setup_.config.hidden_dim)};
}

CUtensorMap CudaBackend::w2_map(const ExpertMatrices& experts, const WeightBox& box) const {
  CUtensorMap map;
  DISTMOE_CHECK(make_w2_map(encode_, w2_layout(experts), weight_dims(), box, &map), kInternal,
                "no tensor map for w2");
  return map;
}

bool CudaBackend::is_one_launch(const ForwardCall& call) const {
  return setup_.size == 1 && few_rows_tiles(call).has_value();
}

std::optional<FewRowsTiles> CudaBackend::few_rows_tiles(const ForwardCall& call) const {
  // A call that saves keeps what this kernel does not store, and clip statistics count it; one that
  // exchanges has no products. Without peers the kernel also combines, which it does without a
  // norm.
  if (call.saves || counts_clipped(call) || call.exchanges_rows) return std::nullopt;
  if (call.norm && setup_.size == 1) return std::nullopt;
  return choose_few_rows(choice_inputs_, choice_, call.num_tokens);
}

bool CudaBackend::launches_grouped(const std::optional<FewRowsTiles>& tiles) const {
  return !tiles || !bounds_few_rows(choice_inputs_, setup_.config.max_tokens);
}

std::int32_t CudaBackend::most_few_rows() const {
  return static_cast<std::int32_t>(max_few_rows(choice_inputs_));
}

GatherPull CudaBackend::pull_args() const {
  return {.source_address = metadata_.gather_source,
          .gather_index = metadata_.gather_index,
          .ready = memory_.buffer_of<std::uint32_t>(buffer_name::kGatherFlags),
          .buffer = &scratch()->hidden_rows,
          .buffer_stride_bytes = setup_.config.hidden_dim * 2,
          .num_pullers = choice_.pulling_clusters};
}

FewRowsArgs CudaBackend::few_rows_args(const ForwardCall& call, const FewRowsTiles& tiles) const {
  FewRowsArgs args{.frame = memory_.buffer_of<CallFrame>(buffer_name::kCallFrame),
                   .counters = memory_.buffer_of<FewRowsCounters>(buffer_name::kFewRowsCounters),
                   .tiles = tiles,
                   .ring = few_rows_ring(tiles, static_cast<std::int32_t>(setup_.config.top_k)),
                   .has_peers = setup_.size > 1,
                   .most_rows = most_few_rows(),
                   .top_k = static_cast<std::int32_t>(setup_.config.top_k),
                   .w13 = w13_args(call.experts),
                   .w2 = w2_args(call.experts)};
  if (args.has_peers != 0) {
    args.w13.tokens.address = metadata_.token_row_address;
    args.w13.pull = pull_args();
    args.w2.result = result_rows();
  } else {
    add_whole_call(call, args);
  }
  return args;
}

void CudaBackend::add_whole_call(const ForwardCall& call, FewRowsArgs& args) const {
  const TensorView& ids = call.topk_ids_TK;
  const TensorView& scores = call.topk_scores_TK;
  // R is at most T * K, or the call fails: that many rows have a place that is known here.
  const std::int64_t rows = std::min(call.num_tokens * setup_.config.top_k, capacity_rows_);
  const ScratchPlace place = place_scratch(scratch_limits(), rows);
  args.w13.result = {.base = place.h2, .stride_bytes = setup_.config.intermediate_dim * 2};
  args.w2.tokens = args.w13.result;
  args.w2.result = {.base = place.hidden_rows, .stride_bytes = setup_.config.hidden_dim * 2};
  args.call = call.index;
  args.state = memory_.buffer_of<CallState>(buffer_name::kCallState);
  args.arrivals = memory_.buffer_of<std::uint32_t>(buffer_name::kArrivals);
  args.record = {.row_origin = metadata_.row_origin,
                 .token_row_address = metadata_.token_row_address,
                 .expert_begin = metadata_.expert_begin,
                 .rows_per_rank = metadata_.rows_per_rank,
                 .rows_per_expert = metadata_.rows_per_expert};
  args.capacity_rows = capacity_rows_;
  args.ids = ids.data;
  args.id_token_stride = ids.strides[0];
  args.id_k_stride = ids.strides[1];
  args.scores = scores.data;
  args.score_token_stride = scores.strides[0];
  args.score_k_stride = scores.strides[1];
  args.ids_are_64_bit = ids.dtype == DType::kI64;
  args.scores_are_bf16 = scores.dtype == DType::kBF16;
  args.x = address_of(call.x_TD);
  args.x_stride_bytes = call.x_TD.strides[0] * 2;
  args.y = address_of(call.y_TD);
  args.y_stride_bytes = call.y_TD.strides[0] * 2;
  args.num_tokens = static_cast<std::int32_t>(call.num_tokens);
  args.num_experts = static_cast<std::int32_t>(setup_.config.num_experts);
}

}  // namespace distmoe::cuda
