// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/select/kernel_choice.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

#include "backend/cuda/select/launch_shapes.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "plan/expert_partition.hpp"
#include "plan/option_names.hpp"

namespace distmoe::cuda {
namespace {

/// NOTE: 16 blocks saturate a link's way in (H200: 362 of 374 GB/s); they pull, then compute.
constexpr std::int32_t kPullingClusters = 8;
constexpr std::int32_t kPublishBlocksPerSm = 4;
/// As many threads as an SM holds.
constexpr std::int32_t kRankSumBlocksPerSm = 8;
/// Of combine's blocks that wait for peers, so that contexts whose calls overlap run on.
constexpr std::int64_t kSmsPerWaitingBlock = 4;
/// Rows and weights are read 16 bytes at a time.
constexpr std::int64_t kWidthStep = 8;
/// Twice as much, of gate and up rows and of bytes in a row, counts in 32 bits.
constexpr std::int64_t kMaxWidth = (std::int64_t{1} << 30) - kWidthStep;

std::int32_t persistent_blocks(const ChoiceInputs& inputs) {
  const std::int64_t allowed =
      std::min(inputs.allowed_sms.value_or(inputs.device_sms), inputs.device_sms);
  const std::int64_t blocks = allowed / inputs.ranks_on_device / kClusterBlocks * kClusterBlocks;
  DISTMOE_CHECK(blocks >= kClusterBlocks, kUnsupported, inputs.ranks_on_device,
                " ranks share a device, which leaves each ", allowed / inputs.ranks_on_device,
                " of ", allowed, " SMs; a rank needs ", kClusterBlocks);
  return static_cast<std::int32_t>(blocks);
}

/// All that kernel_choice = fixed may look at is in the signature.
ProductArithmetic fixed_arithmetic(Precision precision, std::int64_t /*hidden_dim*/,
                                   std::int64_t /*intermediate_dim*/) {
  DISTMOE_CHECK(precision == Precision::kBF16, kUnsupported, "precision is ",
                option_name(precision), "; the CUDA backend of this version has kernels for bf16");
  return {.instruction_k = kInstructionK, .stage_k = kStageK, .splits_of_k = 1};
}

ProductArithmetic choose_arithmetic(const ChoiceInputs& inputs) {
  const ProductArithmetic fixed =
      fixed_arithmetic(inputs.precision, inputs.hidden_dim, inputs.intermediate_dim);
  if (inputs.kernel_choice == KernelChoice::kFixed) return fixed;
  // NOTE: a kernel that sums otherwise (split K for few tokens, say) would compete here, and here
  // alone; there is none.
  return fixed;
}

/// The first `num_long` tiles of a group have tiling.rows_per_tile rows, the others a step fewer;
/// rows that the last one lacks are padding of its instruction.
std::int64_t long_tiles(std::int32_t num_rows, const TokenTiling& tiling) {
  const std::int64_t steps = (std::int64_t{num_rows} + kTileRowStep - 1) / kTileRowStep;
  const std::int64_t short_steps = tiling.rows_per_tile / kTileRowStep - 1;
  return steps - std::int64_t{tiling.num_pairs} * kTilesPerPair * short_steps;
}

/// `num_long` of `count` at the instruction of a long tile, the others at that of a short one.
std::int64_t instruction_rows_of(std::int64_t count, std::int64_t num_long,
                                 const TokenTiling& tiling) {
  return num_long * instruction_rows(tiling.rows_per_tile) +
         (count - num_long) * instruction_rows(tiling.rows_per_tile - kTileRowStep);
}

/// Both blocks of a cluster walk the same stages, so that a pair costs what its larger tile does.
std::int64_t cost_of(std::int32_t num_rows, const TokenTiling& tiling) {
  const std::int64_t num_long = (long_tiles(num_rows, tiling) + kTilesPerPair - 1) / kTilesPerPair;
  return instruction_rows_of(tiling.num_pairs, num_long, tiling) +
         std::int64_t{tiling.num_pairs} * kTileOverheadRows;
}

/// A block with tiles of `rows` rows.
constexpr std::int32_t shared_bytes_of(std::int32_t rows) {
  constexpr auto kTokenBytes = static_cast<std::int32_t>(sizeof(GemmStorage::tokens));
  constexpr auto kRowTableBytes = static_cast<std::int32_t>(sizeof(GemmStorage::result_row));
  constexpr auto kOtherBytes =
      static_cast<std::int32_t>(sizeof(GemmStorage)) - kTokenBytes - kRowTableBytes;
  return kOtherBytes + kTokenBytes / kMaxTokensPerTile * rows +
         kRowTableBytes / kResultRows * padded_result_rows(rows);
}
static_assert(shared_bytes_of(kMaxTokensPerTile) == sizeof(GemmStorage));

}  // namespace

void check_supported(const ChoiceInputs& inputs) {
  DISTMOE_CHECK(inputs.hidden_dim % kWidthStep == 0 && inputs.intermediate_dim % kWidthStep == 0,
                kUnsupported, "CUDA kernels read 16 bytes at a time: hidden_dim (",
                inputs.hidden_dim, ") and intermediate_dim (", inputs.intermediate_dim,
                ") must be multiples of ", kWidthStep);
  DISTMOE_CHECK(std::max(inputs.hidden_dim, inputs.intermediate_dim) <= kMaxWidth, kUnsupported,
                "hidden_dim is ", inputs.hidden_dim, " and intermediate_dim ",
                inputs.intermediate_dim, "; the CUDA backend takes at most ", kMaxWidth);
  DISTMOE_CHECK(inputs.num_experts <= kMaxExperts, kUnsupported, "num_experts is ",
                inputs.num_experts, "; the CUDA backend routes to at most ", kMaxExperts);
  // NOTE: routing counts the rows of an expert in 256 tokens with 16 bits; a token may name one
  // expert in all of its routes.
  DISTMOE_CHECK(inputs.top_k <= kMaxTopK, kUnsupported, "top_k is ", inputs.top_k,
                "; the CUDA backend routes a token to at most ", kMaxTopK, " experts");
  choose_arithmetic(inputs);
}

void check_indices(std::int64_t capacity_rows, std::int64_t num_ranks, std::int64_t max_tokens) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  DISTMOE_CHECK(capacity_rows <= kMost, kUnsupported, "the plan has ", capacity_rows,
                " rows for a rank; the CUDA backend numbers at most ", kMost,
                ": a smaller max_tokens or device_scratch_capacity_factor plans for fewer");
  const std::int64_t chunks = checked_mul(num_ranks, route_chunks_per_rank(max_tokens));
  DISTMOE_CHECK(chunks <= kMost, kUnsupported, num_ranks, " ranks of max_tokens=", max_tokens,
                " make ", chunks, " chunks of ", kRouteChunkTokens,
                " tokens; the CUDA backend routes at most ", kMost);
}

ContextChoice choose_kernels(const ChoiceInputs& inputs) {
  check_supported(inputs);
  ContextChoice choice;
  choice.arithmetic = choose_arithmetic(inputs);
  choice.persistent_blocks = persistent_blocks(inputs);
  choice.pulling_clusters =
      inputs.num_ranks > 1 ? std::min(kPullingClusters, choice.clusters()) : 0;
  choice.publish_blocks = choice.persistent_blocks * kPublishBlocksPerSm;
  const bool sends_sums = inputs.combine == Combine::kPerRank && inputs.num_ranks > 1;
  choice.rank_sum_blocks = sends_sums ? choice.persistent_blocks * kRankSumBlocksPerSm : 0;
  return choice;
}

bool joins_publish_and_route(const ChoiceInputs& inputs, std::int64_t max_tokens) {
  if (inputs.num_ranks == 1 || inputs.num_ranks > kMostJoinedRanks) return false;
  if (max_tokens > kRouteChunkTokens) return false;
  const PublishRouteLayout layout = publish_route_layout(
      {.num_ranks = inputs.num_ranks,
       .max_tokens = max_tokens,
       .top_k = inputs.top_k,
       .num_experts = inputs.num_experts,
       // The first rank owns most experts.
       .num_local_experts = num_local_experts(inputs.num_experts, inputs.num_ranks, 0),
       .has_scores = inputs.combine == Combine::kPerRank});
  return layout.bytes <= kMostPublishRouteBytes;
}

bool joins_meeting_and_combine(const ChoiceInputs& inputs, const ContextChoice& choice,
                               std::int64_t num_tokens) {
  if (inputs.num_ranks == 1 || num_tokens == 0 || num_tokens > inputs.device_sms) return false;
  const std::int64_t waiting = num_tokens * inputs.ranks_on_device;
  if (waiting * kSmsPerWaitingBlock > inputs.device_sms) return false;
  const std::int64_t computing = choice.persistent_blocks * inputs.ranks_on_device;
  return inputs.ranks_on_device == 1 || waiting + computing <= inputs.device_sms;
}

bool starts_w2_early(const ChoiceInputs& inputs, const ContextChoice& choice,
                     std::int64_t num_tokens) {
  constexpr std::int64_t kMinTilesPerCluster = 4;
  constexpr std::int64_t kMaxPairRows = kTilesPerPair * kMaxTokensPerTile;
  if (inputs.ranks_on_device > 1) return false;
  const std::int64_t rows = checked_mul(num_tokens, inputs.top_k);
  const std::int64_t experts = num_local_experts(inputs.num_experts, inputs.num_ranks, 0);
  const std::int64_t pairs = std::max(std::min(rows, experts), rows / kMaxPairRows);
  return checked_mul(pairs, ceil_div(inputs.hidden_dim, kWeightRows)) >=
         kMinTilesPerCluster * choice.clusters();
}

const char* reason_name(Dropped dropped) {
  switch (dropped) {
    case Dropped::kNot: return "none";
    case Dropped::kSharedMemory: return "shared_memory";
    case Dropped::kRegisters: return "registers";
    case Dropped::kSameTiles: return "same_tiles";
  }
  return "unknown";
}

std::vector<TileHeight> tile_heights() {
  std::vector<TileHeight> heights;
  for (std::int32_t rows = kTileRowStep; rows <= kMaxInstructionRows; rows += kTileRowStep) {
    TileHeight height{.rows = rows,
                      .shared_bytes = shared_bytes_of(rows),
                      .registers = rows + kRegistersBesideAccumulators};
    if (height.shared_bytes > kMaxSharedBytes) {
      height.dropped = Dropped::kSharedMemory;
    } else if (height.registers > kConsumerRegisters) {
      height.dropped = Dropped::kRegisters;
    }
    heights.push_back(height);
  }
  return heights;
}

std::int64_t computed_rows(std::int32_t num_rows, const TokenTiling& tiling) {
  return instruction_rows_of(std::int64_t{tiling.num_pairs} * kTilesPerPair,
                             long_tiles(num_rows, tiling), tiling);
}

std::vector<TilingCandidate> rank_tilings(std::int32_t num_rows) {
  std::vector<TilingCandidate> candidates;
  std::int32_t known_pairs = 0;
  for (const TileHeight& height : tile_heights()) {
    if (height.dropped != Dropped::kNot) continue;
    const std::int32_t pair_rows = height.rows * kTilesPerPair;
    const std::int32_t pairs = num_rows / pair_rows + (num_rows % pair_rows != 0 ? 1 : 0);
    TilingCandidate candidate{.height = height.rows, .tiling = spread_rows(num_rows, pairs)};
    candidate.computed_rows = computed_rows(num_rows, candidate.tiling);
    candidate.cost = cost_of(num_rows, candidate.tiling);
    if (pairs == known_pairs) candidate.dropped = Dropped::kSameTiles;
    known_pairs = pairs;
    candidates.push_back(candidate);
  }
  // By height at last: heights ascend as they are listed, so that the order is the same everywhere.
  std::ranges::sort(candidates, {}, [](const TilingCandidate& candidate) {
    return std::tuple(candidate.dropped != Dropped::kNot, candidate.cost,
                      candidate.tiling.num_pairs, candidate.height);
  });
  return candidates;
}

}  // namespace distmoe::cuda
