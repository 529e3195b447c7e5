// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_backend.hpp"

#include <algorithm>
#include <numeric>

#include "comm/agreement.hpp"
#include "core/check.hpp"
#include "plan/capacity_rows.hpp"

namespace distmoe::cpu {
namespace {

SlotRecords slot_records(const ContextMemory& memory) {
  return {.states = memory.buffer_of<SlotState>(buffer_name::kSlotStates),
          .saved = memory.buffer_of<std::int64_t>(buffer_name::kSlotBytes),
          .layers = memory.buffer_of<SavedLayer>(buffer_name::kSavedLayers),
          .saved_before = memory.buffer_of<std::int64_t>(buffer_name::kSavedBefore)};
}

/// A token that names an expert twice in any rank's ids.
bool has_duplicates(std::span<const RankIds> ids, std::int64_t top_k) {
  for (const RankIds& rank : ids) {
    for (std::int64_t token = 0; token < rank.num_tokens; ++token) {
      const std::int32_t* row = rank.ids + token * top_k;
      for (std::int64_t k = 1; k < top_k; ++k) {
        if (row[k] >= 0 && std::find(row, row + k, row[k]) != row + k) return true;
      }
    }
  }
  return false;
}

}  // namespace

CpuBackend::CpuBackend(BackendSetup setup)
    : setup_(std::move(setup)),
      memory_(setup_.plan),
      pool_(setup_.num_threads),
      capacity_rows_(capacity_rows(setup_.config, setup_.size, setup_.plan.total_scratch_factor)),
      headers_(memory_.buffer_of<CallHeader>(buffer_name::kCallHeaders)
                   .first(static_cast<std::size_t>(setup_.size))),
      metadata_sets_(memory_),
      metadata_(metadata_sets_.forward_only()),
      ids_(static_cast<std::size_t>(setup_.size)),
      routing_(setup_.config.num_experts, setup_.config.top_k, setup_.rank, setup_.size,
               metadata_.routing, expert_row_alignment(setup_.config.precision)),
      slots_(setup_.config, setup_.plan, setup_.size, setup_.rank, slot_records(memory_)),
      rows_per_rank_(static_cast<std::size_t>(setup_.size)),
      rows_per_expert_(static_cast<std::size_t>(setup_.config.num_experts)) {
  const CpuWorkspaceLayout layout(setup_.config);
  const std::span<std::byte> workspace = memory_.buffer(buffer_name::kWorkspace);
  for (int worker = 0; worker < pool_.num_threads(); ++worker) {
    workspaces_.emplace_back(workspace.data() + worker * layout.bytes, layout);
  }
}

void CpuBackend::route(const ForwardCall& call) {
  routing_.count(ids_);
  const auto rows = routing_.rows_per_rank();
  const auto fullest = std::ranges::max_element(rows);
  if (*fullest > capacity_rows_) {
    throw AgreedError(
        ErrorCode::kCapacityExceeded,
        concat("call ", call.index, " routes more rows to rank ", fullest - rows.begin(),
               " than the memory plan has: ", *fullest, " required, ", capacity_rows_,
               " available (this is rank ", setup_.rank,
               "); a larger device_scratch_capacity_factor plans for more",
               setup_.config.distinct_experts && has_duplicates(ids_, setup_.config.top_k)
                   ? "; a token names an expert twice, which distinct_experts = false plans for"
                   : ""));
  }
  routing_.order(ids_);
  note_load();
}

/// Of a call that was refused nothing is noted.
void CpuBackend::note_load() {
  std::ranges::copy(routing_.rows_per_rank(), rows_per_rank_.begin());
  for (std::int64_t expert = 0; expert < setup_.config.num_experts; ++expert) {
    std::int64_t rows = 0;
    for (int source = 0; source < setup_.size; ++source) rows += routing_.rows_of(expert, source);
    rows_per_expert_[static_cast<std::size_t>(expert)] = rows;
  }
}

RoutingLoad CpuBackend::load() {
  return {rows_per_rank_, rows_per_expert_, is_recomputed_, scratch_bytes_};
}

std::unique_ptr<Backend> make_backend(BackendSetup setup) {
  check_received_rows(setup.config.max_tokens, setup.size,
                      capacity_rows(setup.config, setup.size, setup.plan.total_scratch_factor));
  return std::make_unique<CpuBackend>(std::move(setup));
}

}  // namespace distmoe::cpu
