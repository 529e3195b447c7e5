// SPDX-License-Identifier: Apache-2.0
//
// The buffers of a context outside slots and scratch: the memory plan lists them, the run-time
// allocates them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"

namespace distmoe {

/// What ranks tell each other about a call before any data, and the record of its first error.
inline constexpr std::int64_t kCallHeaderBytes = 1024;
inline constexpr std::int64_t kErrorRecordBytes = 1024;
/// Of plan/slot_planner.hpp's structs, which assert it.
inline constexpr std::int64_t kSlotStateBytes = 24;
inline constexpr std::int64_t kSavedLayerBytes = 40;

/// Names of the buffers, by which the run-time finds them.
namespace buffer_name {
inline constexpr const char* kSendStaging = "send staging";
inline constexpr const char* kReceiveStaging = "receive staging";
inline constexpr const char* kScoreSend = "score send";
inline constexpr const char* kScoreReceive = "score receive";
inline constexpr const char* kRouteResults = "results of rows";
inline constexpr const char* kTokens = "tokens of all ranks";
inline constexpr const char* kIds = "ids of all ranks";
inline constexpr const char* kScores = "scores";
inline constexpr const char* kRowOrigin = "row origins";
inline constexpr const char* kReceivedRow = "received row of a row";
inline constexpr const char* kRowOfRoute = "row of a route";
inline constexpr const char* kRowCounts = "row counts";
inline constexpr const char* kExpertBegin = "expert offsets";
inline constexpr const char* kCallHeaders = "call headers";
inline constexpr const char* kErrorRecord = "error record";
inline constexpr const char* kWorkspace = "matrix workspace";
// Training
inline constexpr const char* kSlotStates = "slot states";
inline constexpr const char* kSlotBytes = "slot bytes of all ranks";
inline constexpr const char* kSavedLayers = "saved layers";
inline constexpr const char* kSavedBefore = "slot bytes before a layer";
// CUDA
inline constexpr const char* kDispatchWindow = "dispatch window";
inline constexpr const char* kIdWindow = "id window";
inline constexpr const char* kCombineWindow = "combine window";
inline constexpr const char* kFlagWindow = "flag window";
inline constexpr const char* kTokenRowAddress = "token row addresses";
inline constexpr const char* kResultRowAddress = "result row addresses";
inline constexpr const char* kGatherIndex = "gather index of a row";
inline constexpr const char* kGatherSource = "gather sources";
inline constexpr const char* kSumAddress = "addresses of sums";
inline constexpr const char* kSumRows = "rows of sums";
inline constexpr const char* kSumScores = "scores of sums";
inline constexpr const char* kRowsPerRank = "rows per rank";
inline constexpr const char* kRowsPerExpert = "rows per expert";
inline constexpr const char* kCallState = "call state";
inline constexpr const char* kCallFrame = "call frame";
inline constexpr const char* kTileGroups = "tile groups";
inline constexpr const char* kGatherFlags = "gather flags";
inline constexpr const char* kPeerWindows = "peer windows";
inline constexpr const char* kFewRowsCounters = "counters of few rows";
inline constexpr const char* kArrivals = "arrived results of few rows";
inline constexpr const char* kTrainingFrame = "training frame";
inline constexpr const char* kTokenRows = "rows of a token";
inline constexpr const char* kRowsPastScratch = "rows past scratch";
inline constexpr const char* kChunkCounts = "routing counts of chunks";
inline constexpr const char* kChunkTokens = "gathered tokens of chunks";
}  // namespace buffer_name

/// The buffer that has a copy of metadata buffer `name` for every saved layer: slot * N + layer.
std::string saved_buffer_name(std::string_view name);

/// Every buffer is a multiple of 128 bytes.
struct ContextBuffers {
  std::vector<PlanBuffer> communication;
  std::vector<PlanBuffer> metadata;
  std::vector<PlanBuffer> control;
  std::vector<PlanBuffer> workspace;
};

/// Rows of the gather buffer of a CUDA context at most: one per (token, peer).
std::int64_t cuda_gather_rows(const Config& config, std::int64_t ep_size, std::int64_t total_rows);

/// Whether ranks of a CUDA context read the scores of their peers: with combine per rank, and in
/// training, whose backward multiplies dy with them.
bool cuda_publishes_scores(const Config& config, std::int64_t ep_size);

/// Where the published scores lie in the id window of a CUDA context that publishes them.
std::int64_t cuda_score_offset(const Config& config);

/// Where dy lies in the dispatch window of a CUDA training context, behind x.
std::int64_t cuda_dy_offset(const Config& config);

/// Sums that a token's owner receives at most, one from every peer that has a route of it.
std::int64_t cuda_sums_per_token(const Config& config, std::int64_t ep_size);

/// Rows that the plan of a rank takes: as they are received, and with the padding of every expert
/// where the precision pads.
struct PlannedRows {
  std::int64_t received = 0;
  std::int64_t placed = 0;
};

/// The buffers of one of `ep_size` ranks whose plan takes `rows` and whose largest rank owns
/// `num_local_experts_max` experts. `config` is valid. Throws invalid_argument for sizes beyond 64
/// bits.
ContextBuffers context_buffers(const Config& config, int ep_size, const PlanTarget& target,
                               const PlannedRows& rows, std::int64_t num_local_experts_max);

}  // namespace distmoe
