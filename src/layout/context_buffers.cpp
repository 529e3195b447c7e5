// SPDX-License-Identifier: Apache-2.0
#include "layout/context_buffers.hpp"

#include <algorithm>
#include <string>

#include "core/checked_math.hpp"
#include "layout/cpu_workspace.hpp"
#include "layout/cuda_layout.hpp"
#include "layout/packed_row.hpp"
#include "layout/row_origin.hpp"

namespace distmoe {
namespace {

constexpr std::int64_t kBF16Bytes = 2;
constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kInt32Bytes = 4;
constexpr std::int64_t kInt64Bytes = 8;

void add_buffer(std::vector<PlanBuffer>& buffers, const std::string& name, std::int64_t bytes) {
  buffers.push_back({name, bytes});
}

/// Rows whose scratch holds codes have no place there for what W2 and, in a backward, W13 gives
/// back; grad_h3 takes it in between.
void add_route_results(const Config& config, std::int64_t placed_rows,
                       std::vector<PlanBuffer>& buffers) {
  if (!is_block_scaled(config.precision)) return;
  add_buffer(buffers, buffer_name::kRouteResults,
             align_up(checked_product(placed_rows, config.hidden_dim, kBF16Bytes)));
}

/// Dispatch and combine, and their counterparts in backward, take turns in one pair of staging
/// buffers.
std::vector<PlanBuffer> communication_buffers(const Config& config, std::int64_t ep_size,
                                              const PlannedRows& rows) {
  std::vector<PlanBuffer> buffers;
  add_route_results(config, rows.placed, buffers);
  if (ep_size == 1) return buffers;
  const std::int64_t total_rows = rows.received;
  const std::int64_t tokens = config.max_tokens;
  const std::int64_t routes = checked_mul(tokens, config.top_k);
  // A token crosses to a rank once, however many of its experts are there.
  const std::int64_t sent = checked_mul(tokens, std::min(config.top_k, ep_size - 1));
  const std::int64_t received = std::min(total_rows, checked_mul(tokens, ep_size - 1));
  const bool per_rank = config.combine == Combine::kPerRank;
  const std::int64_t row_bytes = checked_mul(config.hidden_dim, kBF16Bytes);
  const std::int64_t dispatch_row_bytes = dispatched_row_bytes(config);
  const std::int64_t combine_row_bytes =
      checked_mul(config.hidden_dim, per_rank ? kFloatBytes : kBF16Bytes);
  const std::int64_t combine_sent = per_rank ? received : total_rows;
  const std::int64_t combine_received = per_rank ? sent : routes;
  std::int64_t send =
      std::max(checked_mul(sent, dispatch_row_bytes), checked_mul(combine_sent, combine_row_bytes));
  std::int64_t receive = std::max(checked_mul(received, dispatch_row_bytes),
                                  checked_mul(combine_received, combine_row_bytes));
  // Backward publishes dy as the forward does x, and returns a row a route whatever the combine.
  if (!config.inference) {
    send = std::max(send, checked_mul(total_rows, row_bytes));
    receive = std::max(receive, checked_mul(routes, row_bytes));
  }
  add_buffer(buffers, buffer_name::kSendStaging, align_up(send));
  add_buffer(buffers, buffer_name::kReceiveStaging, align_up(receive));
  // Scores go to the ranks of the experts, their gradients the other way.
  if (per_rank || !config.inference) {
    add_buffer(buffers, buffer_name::kScoreSend, align_up(checked_mul(routes, kFloatBytes)));
    add_buffer(buffers, buffer_name::kScoreReceive, align_up(checked_mul(total_rows, kFloatBytes)));
  }
  return buffers;
}

/// What a call keeps of its routing.
std::vector<PlanBuffer> call_metadata(const Config& config, std::int64_t ep_size,
                                      std::int64_t placed_rows, std::int64_t num_local_experts) {
  std::vector<PlanBuffer> set;
  const std::int64_t routes = checked_mul(config.max_tokens, config.top_k);
  const auto add = [&](const char* name, std::int64_t count, std::int64_t element_bytes) {
    add_buffer(set, name, align_up(checked_mul(count, element_bytes)));
  };
  add(buffer_name::kTokens, ep_size, kInt64Bytes);
  add(buffer_name::kIds, checked_mul(ep_size, routes), kInt32Bytes);
  add(buffer_name::kScores, routes, kFloatBytes);
  add(buffer_name::kRowOrigin, placed_rows, std::int64_t{sizeof(RowOrigin)});
  add(buffer_name::kReceivedRow, placed_rows, kInt32Bytes);
  add(buffer_name::kRowOfRoute, routes, kInt64Bytes);
  add(buffer_name::kRowCounts, checked_mul(config.num_experts, ep_size), kInt64Bytes);
  add(buffer_name::kExpertBegin, checked_add(num_local_experts, 1), kInt64Bytes);
  return set;
}

/// The device-side counterparts: structs of backend/cuda, whose sizes the backend asserts.
ContextBuffers cuda_buffers(const Config& config, std::int64_t ep_size, std::int64_t total_rows,
                            std::int64_t num_local_experts) {
  ContextBuffers buffers;
  const auto add = [](std::vector<PlanBuffer>& list, const char* name, std::int64_t count,
                      std::int64_t element_bytes) {
    add_buffer(list, name, align_up(checked_mul(count, element_bytes)));
  };
  const std::int64_t routes = checked_mul(config.max_tokens, config.top_k);
  const std::int64_t row_bytes = checked_mul(config.hidden_dim, kBF16Bytes);
  const std::int64_t gathered = cuda_gather_rows(config, ep_size, total_rows);
  const bool per_rank = config.combine == Combine::kPerRank;
  if (ep_size > 1) {
    const std::int64_t published = config.inference ? 1 : 2;  // x; in training dy as well
    add(buffers.communication, buffer_name::kDispatchWindow,
        checked_mul(published, config.max_tokens), row_bytes);
    add(buffers.communication, buffer_name::kFlagWindow, ep_size, cuda_layout::kFlagBytesPerRank);
  }
  const std::int64_t score_bytes =
      cuda_publishes_scores(config, ep_size) ? align_up(checked_mul(routes, kFloatBytes)) : 0;
  add_buffer(buffers.communication, buffer_name::kIdWindow,
             checked_add(cuda_score_offset(config), score_bytes));
  // A row a route, of results or in a backward of gradients; per_rank a sum a peer.
  const bool has_route_rows = !per_rank || !config.inference;
  const std::int64_t route_bytes = has_route_rows ? checked_mul(routes, row_bytes) : 0;
  const std::int64_t sum_bytes =
      per_rank ? checked_product(config.max_tokens, cuda_sums_per_token(config, ep_size),
                                 checked_mul(config.hidden_dim, kFloatBytes))
               : 0;
  if (const std::int64_t bytes = std::max(route_bytes, sum_bytes); bytes > 0) {
    add_buffer(buffers.communication, buffer_name::kCombineWindow, align_up(bytes));
  }

  add(buffers.metadata, buffer_name::kRowOrigin, total_rows, std::int64_t{sizeof(RowOrigin)});
  add(buffers.metadata, buffer_name::kTokenRowAddress, total_rows, kInt64Bytes);
  if (per_rank) add(buffers.metadata, buffer_name::kRowOfRoute, routes, kInt32Bytes);
  if (has_route_rows) {
    add(buffers.metadata, buffer_name::kResultRowAddress, total_rows, kInt64Bytes);
  }
  add(buffers.metadata, buffer_name::kGatherIndex, total_rows, kInt32Bytes);
  add(buffers.metadata, buffer_name::kGatherSource, gathered, kInt64Bytes);
  if (per_rank && ep_size > 1) {
    const std::int64_t summed = checked_mul(gathered, config.top_k);
    add(buffers.metadata, buffer_name::kSumAddress, gathered, kInt64Bytes);
    add(buffers.metadata, buffer_name::kSumRows, summed, kInt32Bytes);
    add(buffers.metadata, buffer_name::kSumScores, summed, kFloatBytes);
  }
  add(buffers.metadata, buffer_name::kExpertBegin, checked_add(num_local_experts, 1), kInt32Bytes);
  add(buffers.metadata, buffer_name::kRowsPerRank, ep_size, kInt64Bytes);
  add(buffers.metadata, buffer_name::kRowsPerExpert, config.num_experts, kInt64Bytes);

  add_buffer(buffers.control, buffer_name::kCallState, cuda_layout::kCallStateBytes);
  add_buffer(buffers.control, buffer_name::kCallFrame, cuda_layout::kCallFrameBytes);
  add(buffers.control, buffer_name::kTileGroups,
      checked_mul(num_local_experts, cuda_layout::tile_groups_per_expert(ep_size)),
      cuda_layout::kTileGroupBytes);
  add(buffers.control, buffer_name::kGatherFlags, ceil_div(gathered, cuda_layout::kGatherChunkRows),
      kInt32Bytes);
  add(buffers.control, buffer_name::kPeerWindows, ep_size, cuda_layout::kPeerWindowsBytes);
  add_buffer(buffers.control, buffer_name::kFewRowsCounters, cuda_layout::kFewRowsCountersBytes);
  if (ep_size == 1) {
    const std::int64_t few_tokens =
        std::min(config.max_tokens, cuda_layout::kFewRoutes / config.top_k);
    add(buffers.control, buffer_name::kArrivals,
        checked_mul(ceil_div(config.hidden_dim, cuda_layout::kFewTileColumns), few_tokens),
        kInt32Bytes);
  }

  const std::int64_t chunks =
      checked_mul(ep_size, ceil_div(config.max_tokens, cuda_layout::kRouteChunkTokens));
  add(buffers.workspace, buffer_name::kChunkCounts, checked_mul(chunks, config.num_experts),
      kInt32Bytes);
  add(buffers.workspace, buffer_name::kChunkTokens, chunks, kInt32Bytes);
  if (config.inference) return buffers;
  add_buffer(buffers.control, buffer_name::kTrainingFrame, cuda_layout::kTrainingFrameBytes);
  add(buffers.workspace, buffer_name::kTokenRows,
      checked_add(routes, checked_mul(gathered, config.top_k)), kInt32Bytes);
  // Scratch ends with the rows of a call; the gradients' product reads whole stages of them.
  add(buffers.workspace, buffer_name::kRowsPastScratch, cuda_layout::kGradientStageRows,
      checked_mul(std::max(config.hidden_dim, checked_mul(2, config.intermediate_dim)),
                  kBF16Bytes));
  return buffers;
}

/// Training keeps one set of metadata for every saved call.
void add_saved_metadata(const Config& config, std::vector<PlanBuffer>& metadata) {
  if (config.inference) return;
  const std::int64_t saved_calls =
      checked_mul(config.num_activation_slots, config.max_moe_layers_per_activation_slot);
  const std::size_t set_size = metadata.size();
  for (std::size_t i = 0; i < set_size; ++i) {
    const PlanBuffer forward_only = metadata[i];
    add_buffer(metadata, saved_buffer_name(forward_only.name),
               checked_mul(saved_calls, forward_only.bytes));
  }
}

/// What a saved CUDA call needs of its windows, which the next call overwrites.
void add_saved_inputs(const Config& config, std::int64_t ep_size,
                      std::vector<PlanBuffer>& metadata) {
  if (config.inference) return;
  const std::int64_t saved_calls =
      checked_mul(config.num_activation_slots, config.max_moe_layers_per_activation_slot);
  const std::int64_t routes = checked_mul(config.max_tokens, config.top_k);
  const auto add = [&](const char* name, std::int64_t count, std::int64_t element_bytes) {
    add_buffer(metadata, saved_buffer_name(name),
               checked_mul(saved_calls, align_up(checked_mul(count, element_bytes))));
  };
  add(buffer_name::kTokens, ep_size, kInt64Bytes);
  add(buffer_name::kIds, routes, kInt32Bytes);
  add(buffer_name::kScores, routes, kFloatBytes);
}

/// What the save-or-recompute decision remembers: of every slot, and of every layer in it.
void add_slot_records(const Config& config, std::int64_t ep_size,
                      std::vector<PlanBuffer>& control) {
  if (config.inference) return;
  const std::int64_t slots = config.num_activation_slots;
  const std::int64_t layers = checked_mul(slots, config.max_moe_layers_per_activation_slot);
  const auto add = [&](const char* name, std::int64_t count, std::int64_t element_bytes) {
    add_buffer(control, name, align_up(checked_mul(count, element_bytes)));
  };
  add(buffer_name::kSlotStates, slots, kSlotStateBytes);
  add(buffer_name::kSlotBytes, checked_mul(slots, ep_size), kInt64Bytes);
  add(buffer_name::kSavedLayers, layers, kSavedLayerBytes);
  add(buffer_name::kSavedBefore, checked_mul(layers, ep_size), kInt64Bytes);
}

}  // namespace

std::string saved_buffer_name(std::string_view name) { return "saved " + std::string(name); }

std::int64_t cuda_gather_rows(const Config& config, std::int64_t ep_size, std::int64_t total_rows) {
  return std::min(total_rows, checked_mul(config.max_tokens, ep_size - 1));
}

bool cuda_publishes_scores(const Config& config, std::int64_t ep_size) {
  return ep_size > 1 && (config.combine == Combine::kPerRank || !config.inference);
}

std::int64_t cuda_dy_offset(const Config& config) {
  return checked_product(config.max_tokens, config.hidden_dim, kBF16Bytes);
}

std::int64_t cuda_score_offset(const Config& config) {
  const std::int64_t routes = checked_mul(config.max_tokens, config.top_k);
  return checked_add(cuda_layout::kIdHeaderBytes, align_up(checked_mul(routes, kInt32Bytes)));
}

std::int64_t cuda_sums_per_token(const Config& config, std::int64_t ep_size) {
  return std::min(config.top_k, ep_size - 1);
}

ContextBuffers context_buffers(const Config& config, int ep_size, const PlanTarget& target,
                               const PlannedRows& rows, std::int64_t num_local_experts_max) {
  if (target.backend == BackendKind::kCuda) {
    ContextBuffers cuda = cuda_buffers(config, ep_size, rows.received, num_local_experts_max);
    add_saved_metadata(config, cuda.metadata);
    add_saved_inputs(config, ep_size, cuda.metadata);
    add_slot_records(config, ep_size, cuda.control);
    return cuda;
  }
  ContextBuffers buffers;
  buffers.communication = communication_buffers(config, ep_size, rows);
  buffers.metadata = call_metadata(config, ep_size, rows.placed, num_local_experts_max);
  add_saved_metadata(config, buffers.metadata);
  add_buffer(buffers.control, buffer_name::kCallHeaders, checked_mul(ep_size, kCallHeaderBytes));
  add_buffer(buffers.control, buffer_name::kErrorRecord, kErrorRecordBytes);
  add_slot_records(config, ep_size, buffers.control);
  add_buffer(buffers.workspace, buffer_name::kWorkspace,
             checked_mul(std::max(target.num_threads, 1), CpuWorkspaceLayout(config).bytes));
  return buffers;
}

}  // namespace distmoe
