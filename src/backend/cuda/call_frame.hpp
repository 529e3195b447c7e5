// SPDX-License-Identifier: Apache-2.0
//
// What depends on the routing of a call: written by the routing kernels into context memory and
// read by every later kernel, never by the host. Shared by host and device.
#pragma once

#include <cstdint>

#include "backend/cuda/scratch_place.hpp"
#include "backend/cuda/tile/token_tiling.hpp"

namespace distmoe::cuda {

enum class FaultKind : std::int32_t {
  kNone = 0,
  kBadExpertId = 1,       ///< index = token * K + k, actual = the id, expected = E
  kCapacityExceeded = 2,  ///< rank = overflowing rank, expected = rows of the plan, actual = rows,
                          ///< index = 1 where a token names an expert twice
  kPeerTimeout = 3,       ///< rank = the peer, expected and actual = epochs
  kGatherTimeout = 4,     ///< index = chunk of the gather buffer, expected and actual = epochs
  kRefusedByPeer = 5,     ///< rank = the one whose host refused its arguments, actual = the
                          ///< ErrorCode of its refusal
  kFailedOnPeer = 6,      ///< rank = the peer that left, or failed while this rank had not
  kLeft = 7,              ///< rank = this one, whose host closed the context or failed
};

/// After which this rank and its peers may no longer agree about calls.
DISTMOE_HOST_DEVICE constexpr bool is_final(FaultKind kind) {
  return kind == FaultKind::kPeerTimeout || kind == FaultKind::kGatherTimeout ||
         kind == FaultKind::kFailedOnPeer || kind == FaultKind::kLeft;
}

/// The first fault of a call; words are made of it on the host.
struct FaultRecord {
  FaultKind kind;
  std::int32_t rank;
  std::int64_t index;
  std::int64_t expected;
  std::int64_t actual;
};
static_assert(sizeof(FaultRecord) == 32);

/// A contiguous range of this rank's rows that belongs to one expert and becomes ready together.
/// Ranges of a product are disjoint; it takes them in the order in which they stand. num_pairs and
/// rows_per_tile are token_tiling(num_rows).
struct alignas(16) TileGroup {
  std::int32_t expert;      ///< local index
  std::int32_t row_begin;   ///< first row
  std::int32_t num_rows;    ///< > 0
  std::int32_t first_pair;  ///< pairs of all groups before it
  std::int32_t num_pairs;
  std::int32_t rows_per_tile;
  std::int32_t
      needs_gather;  ///< 1: rows may lie in the gather buffer; 0: gather flags are not read
  std::int32_t reserved;
};
static_assert(sizeof(TileGroup) == 32);

/// The grouped products of a call over weights, each with its own tile counter. A forward has
/// groups for W13 and W2; a backward has those of W2 for all that it runs.
enum class Product : std::int32_t { kW13 = 0, kW2 = 1, kW2Dgrad = 2, kW13Dgrad = 3 };
inline constexpr int kNumProducts = 4;

/// Groups of an expert at most. W13 may part rows by when they are there: of this rank's tokens,
/// of lower and of higher ranks'. W2 takes all rows of an expert together, so that own and peers'
/// results leave side by side and the links are busy from the first tile to the last.
DISTMOE_HOST_DEVICE constexpr std::int64_t max_groups_per_expert(Product product,
                                                                 std::int64_t num_ranks) {
  return product == Product::kW2 || num_ranks == 1 ? 1 : 3;
}

/// Rows of an expert, on average, up to which reading its weights once more costs more time than
/// own rows could hide of the link's.
inline constexpr std::int64_t kRowsNotParted = 64;

/// The groups of an expert in a call of `num_rows` rows on a rank, the empty ones too.
DISTMOE_HOST_DEVICE constexpr std::int64_t groups_per_expert(Product product,
                                                             std::int64_t num_ranks,
                                                             std::int64_t num_local_experts,
                                                             std::int64_t num_rows) {
  return num_rows <= kRowsNotParted * num_local_experts ? 1
                                                        : max_groups_per_expert(product, num_ranks);
}

/// The groups of a product, in a table that holds those of W13, then those of W2.
DISTMOE_HOST_DEVICE inline TileGroup* groups_of(TileGroup* table, Product product,
                                                std::int64_t num_local_experts,
                                                std::int64_t num_ranks) {
  return product == Product::kW13
             ? table
             : table + num_local_experts * max_groups_per_expert(Product::kW13, num_ranks);
}

/// How many of a product's groups are valid, and what they hold together.
struct GroupCounts {
  std::int32_t num_groups;
  std::int32_t num_pairs;
};

/// Rows of the gather buffer that become ready with one flag.
inline constexpr int kGatherChunkRows = 32;

/// The head of a call. Routing writes all of it; `next_tile` counts up while a product runs.
struct alignas(16) CallFrame {
  std::int32_t failed;    ///< != 0: later kernels compute nothing, outputs become NaN
  std::int32_t num_rows;  ///< R: routed rows of this rank
  GroupCounts counts[kNumProducts];
  std::int32_t num_gather_rows;  ///< rows to be pulled from peers: one per (token, peer)
  std::uint32_t
      gather_epoch;  ///< a ready flag holds this value when its chunk has arrived; never 0
  std::int32_t next_gather_chunk;        ///< routing writes 0
  std::int32_t next_tile[kNumProducts];  ///< routing writes 0
  std::uint32_t has_met;                 ///< 1: combine's first block has met the peers
  FaultRecord fault;
  std::int64_t call;  ///< its number, as the hosts count
  std::uint64_t h1;   ///< where W13 puts h1 in a call with clip statistics
  ScratchPlace scratch;
};

/// What a lean backward keeps of scores between its kernels.
struct LeanScores {
  float* of_rows;  ///< [R]
  float* parts;    ///< [R, num_score_parts] of their gradients, sums over kScorePartColumns of F
};

DISTMOE_HOST_DEVICE inline LeanScores lean_scores(const CallFrame& frame) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): frames hold addresses
  auto* of_rows = reinterpret_cast<float*>(frame.scratch.scores);
  return {of_rows, of_rows + frame.num_rows};
}

}  // namespace distmoe::cuda
