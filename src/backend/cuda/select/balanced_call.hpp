// SPDX-License-Identifier: Apache-2.0
//
// What the choice of kernels makes of one call whose routing is balanced: groups, tiles, waves and
// the work of each product. Pure; for `distmoe explain-kernels`.
//
// Balanced: the experts take turns, the first of every rank, then the second of every rank, and so
// on; the routes of all ranks, one rank after the other, go round. So the rows of two experts
// differ by one at most, also those that come from one rank, and few tokens spread over all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/cuda/call_frame.hpp"
#include "backend/cuda/select/kernel_choice.hpp"
#include "backend/cuda/select/launch_shapes.hpp"

namespace distmoe::cuda {

/// Groups of a call that are alike, see TileGroup.
struct GroupKind {
  std::int32_t num_rows = 0;  ///< of each
  std::int64_t count = 0;
  bool waits_for_pull = false;  ///< W13: it has rows of other ranks' tokens
  TokenTiling tiling;
  std::int64_t computed_rows = 0;  ///< of each
};

/// The groups of one product.
struct GroupList {
  std::int64_t num_pairs = 0;
  std::int64_t computed_rows = 0;  ///< with what pads instructions
  std::vector<GroupKind> kinds{};
};

/// The rows of one rank.
struct BalancedRows {
  std::int64_t num_tokens = 0;  ///< T, of every rank
  std::int64_t num_rows = 0;
  std::int64_t pulled_rows = 0;  ///< of them, of other ranks' tokens
  std::int64_t num_local_experts = 0;
  std::int64_t active_experts = 0;  ///< that have a row
  GroupList w13{};
  GroupList w2{};

  const GroupList& of(Product product) const { return product == Product::kW13 ? w13 : w2; }
};

/// Rows of `rank`, 0 to P - 1. The first rank owns most experts. Throws invalid_argument where rows
/// do not fit the device's 32-bit indices.
BalancedRows balanced_rows(const ChoiceInputs& inputs, std::int64_t rank, std::int64_t num_tokens);

/// Expected rows of an expert: P * T * K / E.
double rows_per_expert(const ChoiceInputs& inputs, std::int64_t num_tokens);

/// A product of one rank. Weight rows of an expert: m; the sum's length: k.
struct ProductLoad {
  Product product = Product::kW13;
  std::int64_t m = 0;
  std::int64_t k = 0;
  std::int64_t weight_tiles = 0;   ///< of an expert
  std::int64_t stages = 0;         ///< of a tile
  std::int64_t cluster_tiles = 0;  ///< weight tiles times pairs: what a cluster draws
  std::int64_t waves = 0;          ///< rounds of the persistent clusters, the last one not full
  double fill = 0.0;               ///< cluster_tiles of waves * clusters
  std::int64_t flops = 0;
  std::int64_t computed_flops = 0;     ///< with padding of rows, weight rows and stages
  std::int64_t weight_bytes = 0;       ///< of the experts that have rows, once
  std::int64_t weight_load_bytes = 0;  ///< as often as pairs load them, most of it from L2
};

ProductLoad product_load(Product product, const ChoiceInputs& inputs, const ContextChoice& choice,
                         const BalancedRows& rows);

/// A launch of a call, in the order of the stream.
struct NamedLaunch {
  const char* kernel;  ///< its function's name, of products what docs/command-line.md says
  LaunchShape shape;
};

/// All launches of `rank` in a forward of `num_tokens` tokens of a context that takes `max_tokens`.
std::vector<NamedLaunch> forward_launches(const ChoiceInputs& inputs, const ContextChoice& choice,
                                          std::int64_t rank, std::int64_t num_tokens,
                                          std::int64_t max_tokens);

const char* product_name(Product product);

}  // namespace distmoe::cuda
