// SPDX-License-Identifier: Apache-2.0
//
// Invariant: rows on a rank are ordered by local expert, source rank, token, k, and every map of a
// Routing agrees with that order written down by sorting all routes of the group. A token crosses
// to a rank once.
#include "backend/cpu/routing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "conformance/moe_problem.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::cpu {
namespace {

using conformance::MoeProblem;
using conformance::MoeShape;
using conformance::RoutePattern;
using conformance::TokenCounts;

struct Route {
  std::int64_t expert, source, token, k;
  auto operator<=>(const Route&) const = default;
};

/// All enabled routes of a group, and the ids as ranks exchange them.
struct Group {
  std::int64_t num_experts, top_k;
  int size;
  std::vector<std::vector<std::int32_t>> ids;  // of every rank
  std::vector<RankIds> rank_ids;
  std::vector<Route> routes;  // in the order of the contract

  Group(const MoeProblem& problem, const TokenCounts& counts)
      : num_experts(problem.shape.num_experts),
        top_k(problem.shape.top_k),
        size(static_cast<int>(counts.size())),
        ids(counts.size()) {
    std::size_t next = 0;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      for (std::int64_t route = 0; route < counts[rank] * top_k; ++route) {
        const auto expert = static_cast<std::int32_t>(problem.ids[next++]);
        ids[rank].push_back(expert);
        if (expert < 0) continue;
        routes.push_back({expert, static_cast<std::int64_t>(rank), route / top_k, route % top_k});
      }
      rank_ids.push_back({ids[rank].data(), counts[rank]});
    }
    std::ranges::sort(routes);
  }

  /// The owner by walking the blocks: the first E mod P ranks own one more.
  int owner(std::int64_t expert) const {
    int rank = 0;
    for (std::int64_t left = expert;; ++rank) {
      const std::int64_t block = num_experts / size + (rank < num_experts % size ? 1 : 0);
      if (left < block) return rank;
      left -= block;
    }
  }
  std::vector<Route> rows_of(int rank) const {
    std::vector<Route> rows;
    std::ranges::copy_if(routes, std::back_inserter(rows),
                         [&](const Route& route) { return owner(route.expert) == rank; });
    return rows;
  }
  /// Distinct tokens of `source` that have a route to `rank`, ascending.
  std::vector<std::int64_t> tokens(int source, int rank) const {
    std::set<std::int64_t> found;
    for (const Route& row : rows_of(rank)) {
      if (row.source == source) found.insert(row.token);
    }
    return {found.begin(), found.end()};
  }
};

/// Rows of a rank where those of every expert are filled up to a multiple.
std::int64_t placed_rows(const Group& group, int rank, std::int64_t alignment) {
  std::map<std::int64_t, std::int64_t> rows_of_expert;
  for (const Route& route : group.rows_of(rank)) ++rows_of_expert[route.expert];
  std::int64_t rows = 0;
  for (const auto& [expert, count] : rows_of_expert) {
    rows += (count + alignment - 1) / alignment * alignment;
  }
  return rows;
}

/// A Routing of one rank with buffers of exactly the size that it needs.
struct RankRouting {
  std::vector<RowOrigin> row_origin;
  std::vector<std::int32_t> received_row;
  std::vector<std::int64_t> row_of_route, counts, expert_begin;
  Routing routing;

  explicit RankRouting(const Group& group, int rank, std::int64_t alignment = 1)
      : row_origin(static_cast<std::size_t>(placed_rows(group, rank, alignment)),
                   RowOrigin{-7, -7, -7}),
        received_row(row_origin.size(), -7),
        row_of_route(group.ids[static_cast<std::size_t>(rank)].size(), -7),
        counts(static_cast<std::size_t>(group.num_experts * group.size), -7),
        expert_begin(static_cast<std::size_t>(group.num_experts) + 1, -7),
        routing(group.num_experts, group.top_k, rank, group.size,
                {row_origin, received_row, row_of_route, counts, expert_begin}, alignment) {
    routing.count(group.rank_ids);
    routing.order(group.rank_ids);
  }
};

void expect_rows(const Group& group, int rank, const Routing& routing) {
  const std::vector<Route> rows = group.rows_of(rank);
  ASSERT_EQ(routing.num_rows(), static_cast<std::int64_t>(rows.size()));
  std::vector<std::int64_t> block_begin(static_cast<std::size_t>(group.size) + 1);
  for (int source = 0; source < group.size; ++source) {
    const auto sent = group.tokens(source, rank).size();
    block_begin[static_cast<std::size_t>(source) + 1] =
        block_begin[static_cast<std::size_t>(source)] +
        (source == rank ? 0 : static_cast<std::int64_t>(sent));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Route& row = rows[i];
    const RowOrigin& origin = routing.row_origin()[i];
    ASSERT_EQ(std::tuple(origin.source, origin.token, origin.k),
              std::tuple(row.source, row.token, row.k))
        << "row " << i << " of rank " << rank;
    const std::int64_t local = row.expert - routing.first_expert();
    ASSERT_LE(routing.expert_begin(local), static_cast<std::int64_t>(i));
    ASSERT_GT(routing.expert_begin(local + 1), static_cast<std::int64_t>(i));
    const auto tokens = group.tokens(static_cast<int>(row.source), rank);
    const auto place = std::ranges::find(tokens, row.token) - tokens.begin();
    ASSERT_EQ(
        routing.received_row(static_cast<std::int64_t>(i)),
        row.source == rank ? row.token : block_begin[static_cast<std::size_t>(row.source)] + place);
  }
}

/// Where a rank finds the results of its own routes.
void expect_routes(const Group& group, int rank, const Routing& routing) {
  std::vector<std::int64_t> expected(group.ids[static_cast<std::size_t>(rank)].size(), -1);
  std::int64_t returned = 0;
  for (int peer = 0; peer < group.size; ++peer) {
    const std::vector<Route> rows = group.rows_of(peer);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].source != rank) continue;
      expected[static_cast<std::size_t>(rows[i].token * group.top_k + rows[i].k)] =
          peer == rank ? static_cast<std::int64_t>(i) : returned++;
    }
  }
  for (std::size_t route = 0; route < expected.size(); ++route) {
    ASSERT_EQ(routing.row_of_route(static_cast<std::int64_t>(route)), expected[route])
        << "route " << route << " of rank " << rank;
  }
}

void expect_counts(const Group& group, int rank, const Routing& routing) {
  for (int peer = 0; peer < group.size; ++peer) {
    const auto rows = group.rows_of(peer);
    const auto count_from = [](const std::vector<Route>& list, int source) {
      return std::ranges::count(list, source, &Route::source);
    };
    EXPECT_EQ(routing.rows_per_rank()[static_cast<std::size_t>(peer)],
              static_cast<std::int64_t>(rows.size()));
    EXPECT_EQ(routing.routes_to(peer), count_from(rows, rank));
    EXPECT_EQ(routing.routes_from(peer), count_from(group.rows_of(rank), peer));
    const auto tokens_to = static_cast<std::int64_t>(group.tokens(rank, peer).size());
    const auto tokens_from = static_cast<std::int64_t>(group.tokens(peer, rank).size());
    EXPECT_EQ(routing.tokens_to(peer), peer == rank ? 0 : tokens_to);
    EXPECT_EQ(routing.tokens_from(peer), peer == rank ? 0 : tokens_from);
  }
  for (std::int64_t expert = 0; expert < group.num_experts; ++expert) {
    EXPECT_EQ(routing.owner(expert), group.owner(expert));
    for (int source = 0; source < group.size; ++source) {
      EXPECT_EQ(routing.rows_of(expert, source),
                std::ranges::count_if(group.routes, [&](const Route& route) {
                  return route.expert == expert && route.source == source;
                }));
    }
  }
}

void expect_contract(const MoeProblem& problem, const TokenCounts& counts) {
  const Group group(problem, counts);
  for (int rank = 0; rank < group.size; ++rank) {
    const RankRouting built(group, rank);
    expect_rows(group, rank, built.routing);
    expect_routes(group, rank, built.routing);
    expect_counts(group, rank, built.routing);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Routing, RowsFollowTheOrderOfTheContract) {
  std::uint64_t seed = 0;
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    for (const std::int64_t experts : {1, 2, 5, 13, 24}) {
      for (const RoutePattern pattern :
           {RoutePattern::kMixed, RoutePattern::kOneExpert, RoutePattern::kAllDisabled}) {
        const MoeProblem problem = conformance::make_problem({.num_tokens = 41,
                                                              .hidden_dim = 1,
                                                              .intermediate_dim = 1,
                                                              .num_experts = experts,
                                                              .top_k = 4},
                                                             pattern, ++seed);
        SCOPED_TRACE(testing::Message() << size << " ranks, " << experts << " experts");
        ASSERT_NO_FATAL_FAILURE(
            expect_contract(problem, conformance::ragged_split(41, size, seed)));
      }
    }
  }
}

// reports: A32, the order itself for every number of tokens, K = E = 8.
TEST(Routing, EveryNumberOfTokensHasTheOrderOfTheContract) {
  for (std::int64_t tokens = 0; tokens <= 130; ++tokens) {
    const MoeProblem problem =
        conformance::make_problem({.num_tokens = tokens,
                                   .hidden_dim = 1,
                                   .intermediate_dim = 1,
                                   .num_experts = 8,
                                   .top_k = 8},
                                  tokens % 2 == 0 ? RoutePattern::kDistinct : RoutePattern::kMixed,
                                  static_cast<std::uint64_t>(tokens));
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    ASSERT_NO_FATAL_FAILURE(expect_contract(problem, conformance::even_split(tokens, 2)));
  }
}

// reports: A20, an expert that a token names twice takes two rows and leaves its neighbour alone.
TEST(Routing, AnExpertNamedTwiceTakesTwoRowsOfEachToken) {
  MoeProblem problem = conformance::make_problem(
      {.num_tokens = 8, .hidden_dim = 1, .intermediate_dim = 1, .num_experts = 3, .top_k = 2},
      RoutePattern::kAllDisabled, 1);
  std::ranges::fill(problem.ids, 1);
  const Group group(problem, {8});
  const RankRouting built(group, 0);
  EXPECT_EQ(built.routing.rows_of(1, 0), 16);
  EXPECT_EQ(built.routing.rows_of(0, 0), 0);
  EXPECT_EQ(built.routing.rows_of(2, 0), 0);
  EXPECT_NO_FATAL_FAILURE(expect_contract(problem, {8}));
  EXPECT_NO_FATAL_FAILURE(expect_contract(problem, {3, 0, 5}));
}

/// Where experts are padded every map names the same row, further behind.
TEST(Routing, PaddedExpertsBeginAtMultiplesAndKeepTheirRows) {
  constexpr std::int64_t kAlignment = 128;
  const MoeProblem problem = conformance::make_problem(
      {.num_tokens = 300, .hidden_dim = 1, .intermediate_dim = 1, .num_experts = 7, .top_k = 3},
      RoutePattern::kMixed, 5);
  const Group group(problem, conformance::ragged_split(300, 3, 1));
  for (int rank = 0; rank < group.size; ++rank) {
    const RankRouting plain(group, rank);
    const RankRouting padded(group, rank, kAlignment);
    const Routing& a = plain.routing;
    const Routing& b = padded.routing;
    EXPECT_EQ(b.num_rows(), a.num_rows());
    EXPECT_EQ(b.num_placed_rows(), std::ssize(padded.row_origin));
    EXPECT_EQ(b.placed_rows_per_rank()[static_cast<std::size_t>(rank)], b.num_placed_rows());
    for (std::int64_t expert = 0; expert < a.num_local_experts(); ++expert) {
      EXPECT_EQ(b.expert_begin(expert) % kAlignment, 0);
      const std::int64_t behind = b.expert_begin(expert) - a.expert_begin(expert);
      EXPECT_EQ(b.expert_end(expert), a.expert_end(expert) + behind);
      EXPECT_EQ(a.expert_end(expert), a.expert_begin(expert + 1));
      for (std::int64_t row = a.expert_begin(expert); row < a.expert_end(expert); ++row) {
        const RowOrigin& from = a.row_origin()[static_cast<std::size_t>(row)];
        const RowOrigin& to = b.row_origin()[static_cast<std::size_t>(row + behind)];
        ASSERT_EQ(std::tuple(from.source, from.token, from.k),
                  std::tuple(to.source, to.token, to.k));
        ASSERT_EQ(a.received_row(row), b.received_row(row + behind));
        if (from.source != rank) continue;
        const std::int64_t route = std::int64_t{from.token} * group.top_k + from.k;
        ASSERT_EQ(a.row_of_route(route), row);
        ASSERT_EQ(b.row_of_route(route), row + behind);
      }
    }
  }
}

// reports: A54, more than 65535 routes over 256 experts.
TEST(Routing, MoreRoutesThan16BitsCount) {
  const MoeProblem problem = conformance::make_problem(
      {.num_tokens = 8300, .hidden_dim = 1, .intermediate_dim = 1, .num_experts = 256, .top_k = 8},
      RoutePattern::kDistinct, 3);
  const Group group(problem, {8300});
  const RankRouting built(group, 0);
  ASSERT_EQ(built.routing.num_rows(), 66400);
  for (std::size_t i = 0; i < group.routes.size(); ++i) {
    ASSERT_EQ(built.routing.row_origin()[i].token, group.routes[i].token) << i;
    ASSERT_EQ(built.routing.row_origin()[i].k, group.routes[i].k) << i;
  }
}

}  // namespace
}  // namespace distmoe::cpu
