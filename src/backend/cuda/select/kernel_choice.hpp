// SPDX-License-Identifier: Apache-2.0
//
// How the calls of a context run on a GPU, as pure functions of plain numbers: what is possible is
// enumerated, what cannot be is dropped with a named reason, the rest is ranked. The CUDA backend
// asks them for everything that its host decides; token_tiling() is the head of the ranking in the
// form in which the routing kernels compute it on the device. No CUDA, no device:
// `distmoe explain-kernels` prints the same choice anywhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/cuda/tile/gemm_storage.hpp"
#include "backend/cuda/tile/token_tiling.hpp"
#include "distmoe/config.hpp"

namespace distmoe::cuda {

/// The kernel family of both products.
inline constexpr const char* kGroupedGemmName = "sm90_bf16_grouped_gemm";

/// Everything that a choice may look at. Ranks and SMs are 1 or more.
struct ChoiceInputs {
  Precision precision = Precision::kBF16;
  KernelChoice kernel_choice = KernelChoice::kTuned;
  std::int64_t hidden_dim = 0;        ///< D
  std::int64_t intermediate_dim = 0;  ///< F
  std::int64_t top_k = 0;             ///< K
  std::int64_t num_experts = 0;       ///< E
  std::int64_t num_ranks = 1;         ///< P
  Combine combine = Combine::kPerRoute;
  std::int64_t ranks_on_device = 1;  ///< that share this rank's device, this one included
  std::int64_t device_sms = 0;
  std::optional<std::int64_t> allowed_sms = std::nullopt;  ///< Config::num_sms
};

/// What the bits of a product depend on: which products one instruction adds, in how many stages
/// the sum over k comes and how many parts of it are added at the end. Neither the tile of a row
/// nor the SM that computes it is in here: every element of an accumulator has a sum of its own.
struct ProductArithmetic {
  std::int32_t instruction_k = 0;
  std::int32_t stage_k = 0;
  std::int32_t splits_of_k = 0;
  bool operator==(const ProductArithmetic&) const = default;
};

/// What a context decides once, for all of its calls.
struct ContextChoice {
  ProductArithmetic arithmetic;
  std::int32_t persistent_blocks = 0;  ///< of either product, one an SM, in clusters
  std::int32_t pulling_clusters = 0;   ///< of W13, that pull peers' rows before they compute
  std::int32_t publish_blocks = 0;
  std::int32_t rank_sum_blocks = 0;  ///< combine per_rank

  std::int32_t clusters() const { return persistent_blocks / kClusterBlocks; }
};

/// Throws unsupported where no kernel takes the sizes or the precision.
void check_supported(const ChoiceInputs& inputs);

/// Routing counts in 64 bits, but rows and chunks of tokens are numbered with 32, as tokens are.
/// Throws unsupported where a context plans for more than that; `capacity_rows` of a rank.
void check_indices(std::int64_t capacity_rows, std::int64_t num_ranks, std::int64_t max_tokens);

/// Throws as check_supported does, and unsupported where ranks that share a device get fewer SMs
/// each than a cluster has blocks.
ContextChoice choose_kernels(const ChoiceInputs& inputs);

/// Whether clusters that W13 leaves begin with W2, whose weights they can load at once, in a call
/// of `num_tokens` tokens of every rank. A cluster holds the tile that it began and the next one:
/// with few tiles the clusters that come first would take those of the others (H200, 1 token of
/// Mixtral-8x7B: 313 us instead of 258). Ranks that share a device keep to their own SMs.
bool starts_w2_early(const ChoiceInputs& inputs, const ContextChoice& choice,
                     std::int64_t num_tokens);

/// Whether calls of a context with peers that takes `max_tokens` tokens a rank begin, publish, meet
/// and route in one launch, whose last block routes alone: few enough tokens that one chunk is all
/// of a rank's, and that what all ranks publish fits beside the counts of a block. The same on all
/// ranks.
bool joins_publish_and_route(const ChoiceInputs& inputs, std::int64_t max_tokens);

/// Whether combine meets the peers itself in a call of `num_tokens` tokens of this rank: its
/// blocks, one a token, hold SMs while they wait. They are a quarter of the device's at most, and
/// beside those of all ranks that share it, so that whatever a peer waits for finds room. Ranks
/// need not choose alike.
bool joins_meeting_and_combine(const ChoiceInputs& inputs, const ContextChoice& choice,
                               std::int64_t num_tokens);

/// Why a candidate was not taken.
enum class Dropped {
  kNot,
  kSharedMemory,  ///< the stages of such a tile do not fit a block
  kRegisters,     ///< its accumulators leave too few registers: the kernel would spill
  kSameTiles,     ///< a lower height cuts these rows into the same tiles
};
const char* reason_name(Dropped dropped);

/// Token rows of a tile that the tensor core can do, and what they need.
struct TileHeight {
  std::int32_t rows = 0;
  std::int32_t shared_bytes = 0;
  std::int32_t registers = 0;  ///< of a consumer thread
  Dropped dropped = Dropped::kNot;
};

/// Every multiple of kTileRowStep up to kMaxInstructionRows.
std::vector<TileHeight> tile_heights();

/// A way to cut one group's rows into tiles of at most `height` rows.
struct TilingCandidate {
  std::int32_t height = 0;
  TokenTiling tiling;
  std::int64_t computed_rows = 0;  ///< with the rows that pad instructions
  std::int64_t cost = 0;           ///< in token rows of a cluster, overhead included
  Dropped dropped = Dropped::kNot;
};

/// Rows that the tensor cores compute for a group of `num_rows` rows.
std::int64_t computed_rows(std::int32_t num_rows, const TokenTiling& tiling);

/// All heights that the kernel has, for a group of `num_rows` > 0 rows: the cheapest first, of
/// equals the one with fewer pairs, then what was dropped.
std::vector<TilingCandidate> rank_tilings(std::int32_t num_rows);

}  // namespace distmoe::cuda
