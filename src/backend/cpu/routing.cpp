// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/routing.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/check.hpp"
#include "core/checked_math.hpp"

namespace distmoe::cpu {

void check_received_rows(std::int64_t max_tokens, int size, std::int64_t capacity_rows) {
  // Every token of another rank arrives once, and only with a row of its own.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t received = max_tokens * (size - 1);
  DISTMOE_CHECK(std::min(received, capacity_rows) <= kMost, kUnsupported, "max_tokens (",
                max_tokens, ") of ", size - 1, " other ranks are ", received,
                " tokens and the memory plan has ", capacity_rows,
                " rows; a rank of the CPU backend receives at most ", kMost, " tokens in a call");
}

Routing::Routing(std::int64_t num_experts, std::int64_t top_k, int rank, int size,
                 RoutingBuffers buffers, std::int64_t row_alignment)
    : num_experts_(num_experts),
      top_k_(top_k),
      rank_(rank),
      size_(size),
      row_alignment_(row_alignment),
      first_expert_(distmoe::first_expert(num_experts, size, rank)),
      num_local_(distmoe::num_local_experts(num_experts, size, rank)),
      buffers_(buffers),
      rows_per_rank_(static_cast<std::size_t>(size)),
      placed_rows_per_rank_(static_cast<std::size_t>(size)),
      tokens_from_(static_cast<std::size_t>(size)),
      tokens_to_(static_cast<std::size_t>(size)),
      routes_to_(static_cast<std::size_t>(size)),
      routes_from_(static_cast<std::size_t>(size)),
      cursor_(static_cast<std::size_t>(num_experts)) {}

std::int64_t Routing::aligned(std::int64_t rows) const {
  return ceil_div(rows, row_alignment_) * row_alignment_;
}

void Routing::count(std::span<const RankIds> ids) {
  std::ranges::fill(buffers_.counts, 0);
  for (int source = 0; source < size_; ++source) {
    const RankIds& from = ids[static_cast<std::size_t>(source)];
    for (std::int64_t route = 0; route < from.num_tokens * top_k_; ++route) {
      const std::int64_t expert = from.ids[route];
      if (expert >= 0) ++buffers_.counts[static_cast<std::size_t>(expert * size_ + source)];
    }
  }
  std::ranges::fill(rows_per_rank_, 0);
  std::ranges::fill(placed_rows_per_rank_, 0);
  std::ranges::fill(routes_to_, 0);
  std::ranges::fill(routes_from_, 0);
  for (std::int64_t expert = 0; expert < num_experts_; ++expert) {
    const auto peer = static_cast<std::size_t>(owner(expert));
    std::int64_t rows = 0;
    for (int source = 0; source < size_; ++source) {
      rows += rows_of(expert, source);
      if (owner(expert) == rank_) {
        routes_from_[static_cast<std::size_t>(source)] += rows_of(expert, source);
      }
    }
    rows_per_rank_[peer] += rows;
    placed_rows_per_rank_[peer] += aligned(rows);
    routes_to_[peer] += rows_of(expert, rank_);
  }
}

void Routing::order(std::span<const RankIds> ids) {
  order_rows(ids);
  const RankIds& own = ids[static_cast<std::size_t>(rank_)];
  order_routes(own);
  count_tokens_to_peers(own);
}

void Routing::order_rows(std::span<const RankIds> ids) {
  std::int64_t next = 0;
  for (std::int64_t expert = 0; expert < num_local_; ++expert) {
    buffers_.expert_begin[static_cast<std::size_t>(expert)] = next;
    next += aligned(expert_end(expert) - next);
  }
  buffers_.expert_begin[static_cast<std::size_t>(num_local_)] = next;

  std::int64_t received = 0;
  for (int source = 0; source < size_; ++source) {
    std::int64_t arrived = 0;
    std::int64_t last_token = -1;
    for_each_local_route(source, ids[static_cast<std::size_t>(source)],
                         [&](std::int64_t token, std::int64_t k, std::int64_t row) {
                           if (token != last_token) ++arrived;
                           last_token = token;
                           const auto index = static_cast<std::size_t>(row);
                           buffers_.row_origin[index] = {source, static_cast<std::int32_t>(token),
                                                         static_cast<std::int32_t>(k)};
                           buffers_.received_row[index] = static_cast<std::int32_t>(
                               source == rank_ ? token : received + arrived - 1);
                         });
    tokens_from_[static_cast<std::size_t>(source)] = source == rank_ ? 0 : arrived;
    if (source != rank_) received += arrived;
  }
}

void Routing::order_routes(const RankIds& own) {
  // A peer sends back this rank's routes in its own row order: by expert, then token, then k. The
  // routes that this rank computes itself are read where they are.
  std::int64_t next = 0;
  for (std::int64_t expert = 0; expert < num_experts_; ++expert) {
    const std::int64_t local = expert - first_expert_;
    if (local >= 0 && local < num_local_) {
      cursor_[static_cast<std::size_t>(expert)] = first_row_from(local, rank_);
    } else {
      cursor_[static_cast<std::size_t>(expert)] = next;
      next += rows_of(expert, rank_);
    }
  }
  for (std::int64_t route = 0; route < own.num_tokens * top_k_; ++route) {
    const std::int64_t expert = own.ids[route];
    buffers_.row_of_route[static_cast<std::size_t>(route)] =
        expert < 0 ? -1 : cursor_[static_cast<std::size_t>(expert)]++;
  }
}

void Routing::count_tokens_to_peers(const RankIds& own) {
  std::ranges::fill(tokens_to_, 0);
  for (std::int64_t token = 0; token < own.num_tokens; ++token) {
    const std::int32_t* ids = own.ids + token * top_k_;
    for (std::int64_t k = 0; k < top_k_; ++k) {
      if (ids[k] < 0) continue;
      const int peer = owner(ids[k]);
      const bool seen =
          std::any_of(ids, ids + k, [&](std::int32_t id) { return id >= 0 && owner(id) == peer; });
      if (!seen && peer != rank_) ++tokens_to_[static_cast<std::size_t>(peer)];
    }
  }
}

}  // namespace distmoe::cpu
