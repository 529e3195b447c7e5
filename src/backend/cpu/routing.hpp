// SPDX-License-Identifier: Apache-2.0
//
// Who sends which row where. Every rank derives it from the expert ids of all ranks, so that all
// know every rank's load. The order of rows on a rank is fixed: local expert, then source
// rank, then token, then k. Where the precision pads, the rows of every expert begin at a multiple
// of 128: what lies between has no token, and no step reads it. The arrays live in context memory;
// this file never allocates there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/row_origin.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cpu {

/// Arrays in context memory, sized by the plan.
struct RoutingBuffers {
  std::span<RowOrigin> row_origin;       ///< [rows, padding included]
  std::span<std::int32_t> received_row;  ///< [rows, ...] of the dispatch block, or own token
  std::span<std::int64_t> row_of_route;  ///< [T * K], see Routing::row_of_route
  std::span<std::int64_t> counts;        ///< [E * P]
  std::span<std::int64_t> expert_begin;  ///< [L + 1]
};

/// The ids of one rank's tokens, [num_tokens, K], each -1 or in [0, E).
struct RankIds {
  const std::int32_t* ids = nullptr;
  std::int64_t num_tokens = 0;
};

/// Throws unsupported where a call may bring a rank more tokens of others than received_row counts.
void check_received_rows(std::int64_t max_tokens, int size, std::int64_t capacity_rows);

/// The routing of one call, seen from one rank.
class Routing {
 public:
  /// The rows of an expert begin at multiples of `row_alignment`.
  Routing(std::int64_t num_experts, std::int64_t top_k, int rank, int size, RoutingBuffers buffers,
          std::int64_t row_alignment = 1);

  /// Works in other buffers from now on.
  void bind(const RoutingBuffers& buffers) { buffers_ = buffers; }
  /// Counts the rows of every expert and rank. After it rows_per_rank(), placed_rows_per_rank() and
  /// rows_of() are valid.
  void count(std::span<const RankIds> ids);
  /// Fills the row maps. Call after count(), when rows_per_rank()[rank] fits the buffers.
  void order(std::span<const RankIds> ids);

  std::span<const std::int64_t> rows_per_rank() const { return rows_per_rank_; }
  /// The same with the padding of every expert.
  std::span<const std::int64_t> placed_rows_per_rank() const { return placed_rows_per_rank_; }
  /// Rows of global expert `expert` that come from rank `source`.
  std::int64_t rows_of(std::int64_t expert, int source) const {
    return buffers_.counts[static_cast<std::size_t>(expert * size_ + source)];
  }
  std::int64_t num_rows() const { return rows_per_rank_[static_cast<std::size_t>(rank_)]; }
  /// Of this rank, padding included.
  std::int64_t num_placed_rows() const {
    return placed_rows_per_rank_[static_cast<std::size_t>(rank_)];
  }
  std::int64_t num_local_experts() const { return num_local_; }
  /// First row of local expert `expert`; expert_begin(num_local_experts()) is num_placed_rows().
  std::int64_t expert_begin(std::int64_t expert) const {
    return buffers_.expert_begin[static_cast<std::size_t>(expert)];
  }
  /// Behind its last row that has a token.
  std::int64_t expert_end(std::int64_t expert) const {
    std::int64_t end = expert_begin(expert);
    for (int source = 0; source < size_; ++source) end += rows_of(first_expert_ + expert, source);
    return end;
  }
  /// Rows of this rank from first to last; what pads is of no route.
  std::span<const RowOrigin> row_origin() const {
    return buffers_.row_origin.first(static_cast<std::size_t>(num_placed_rows()));
  }
  /// Position of a row's token in the block of deduplicated rows that its source sent (all sources
  /// one after the other); for rows of this rank itself the token.
  std::int64_t received_row(std::int64_t row) const {
    return buffers_.received_row[static_cast<std::size_t>(row)];
  }
  /// Deduplicated tokens that arrive from `source`, and that this rank sends to `peer`.
  std::int64_t tokens_from(int source) const {
    return tokens_from_[static_cast<std::size_t>(source)];
  }
  std::int64_t tokens_to(int peer) const { return tokens_to_[static_cast<std::size_t>(peer)]; }
  /// Routes of this rank's tokens that rank `peer` computes.
  std::int64_t routes_to(int peer) const { return routes_to_[static_cast<std::size_t>(peer)]; }
  /// Rows of this rank that come from rank `source`.
  std::int64_t routes_from(int source) const {
    return routes_from_[static_cast<std::size_t>(source)];
  }
  /// Where the result of route token * K + k is: a row of this rank where this rank computes it,
  /// else a row of the combine block that the other ranks send (all peers one after the other, each
  /// in its row order); -1 for a disabled route.
  std::int64_t row_of_route(std::int64_t route) const {
    return buffers_.row_of_route[static_cast<std::size_t>(route)];
  }

  /// Calls visit(token, k, row) for every route of `source` that this rank computes, ordered by
  /// token, then k. `ids` are the source's. Call after count() and the start of order().
  template <typename Visit>
  void for_each_local_route(int source, const RankIds& ids, const Visit& visit) const {
    std::vector<std::int64_t> next(static_cast<std::size_t>(num_local_));
    for (std::int64_t expert = 0; expert < num_local_; ++expert) {
      next[static_cast<std::size_t>(expert)] = first_row_from(expert, source);
    }
    for (std::int64_t token = 0; token < ids.num_tokens; ++token) {
      for (std::int64_t k = 0; k < top_k_; ++k) {
        const std::int64_t expert = ids.ids[token * top_k_ + k] - first_expert_;
        if (expert < 0 || expert >= num_local_) continue;
        visit(token, k, next[static_cast<std::size_t>(expert)]++);
      }
    }
  }

  /// First row of local expert `expert` that comes from rank `source`.
  std::int64_t first_row_from(std::int64_t expert, int source) const {
    std::int64_t row = expert_begin(expert);
    for (int before = 0; before < source; ++before) row += rows_of(first_expert_ + expert, before);
    return row;
  }
  std::int64_t first_expert() const { return first_expert_; }

  int owner(std::int64_t expert) const {
    return static_cast<int>(expert_owner(num_experts_, size_, expert));
  }
  int rank() const { return rank_; }
  int size() const { return size_; }
  std::int64_t top_k() const { return top_k_; }

 private:
  std::int64_t aligned(std::int64_t rows) const;
  void order_rows(std::span<const RankIds> ids);
  void order_routes(const RankIds& own);
  void count_tokens_to_peers(const RankIds& own);

  std::int64_t num_experts_;
  std::int64_t top_k_;
  int rank_;
  int size_;
  std::int64_t row_alignment_;
  std::int64_t first_expert_;
  std::int64_t num_local_;
  RoutingBuffers buffers_;
  std::vector<std::int64_t> rows_per_rank_;
  std::vector<std::int64_t> placed_rows_per_rank_;
  std::vector<std::int64_t> tokens_from_;
  std::vector<std::int64_t> tokens_to_;
  std::vector<std::int64_t> routes_to_;
  std::vector<std::int64_t> routes_from_;
  std::vector<std::int64_t> cursor_;  ///< next row of every expert, while ordering
};

}  // namespace distmoe::cpu
