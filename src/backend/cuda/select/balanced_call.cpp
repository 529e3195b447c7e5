// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/select/balanced_call.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "backend/cuda/select/few_rows_choice.hpp"
#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "plan/expert_partition.hpp"

namespace distmoe::cuda {
namespace {

constexpr std::int64_t kElementBytes = 2;

/// Routes to the expert that takes `turn` among the first `num_routes` of all ranks.
std::int64_t routes_before(std::int64_t num_routes, std::int64_t num_experts, std::int64_t turn) {
  return num_routes / num_experts + (turn < num_routes % num_experts ? 1 : 0);
}

/// Adds a group of `num_rows` rows, if there is one, to the kind that it is of.
void add_group(GroupList& groups, std::int64_t num_rows, bool waits_for_pull) {
  if (num_rows == 0) return;
  const auto same = [&](const GroupKind& kind) {
    return kind.num_rows == num_rows && kind.waits_for_pull == waits_for_pull;
  };
  auto kind = std::ranges::find_if(groups.kinds, same);
  if (kind == groups.kinds.end()) {
    const auto count = static_cast<std::int32_t>(num_rows);
    const TokenTiling tiling = token_tiling(count);
    groups.kinds.push_back({.num_rows = count,
                            .waits_for_pull = waits_for_pull,
                            .tiling = tiling,
                            .computed_rows = computed_rows(count, tiling)});
    kind = std::prev(groups.kinds.end());
  }
  ++kind->count;
  groups.computed_rows += kind->computed_rows;
  groups.num_pairs += kind->tiling.num_pairs;
}

}  // namespace

const char* product_name(Product product) {
  return product == Product::kW13 ? "w13_swiglu" : "w2_scatter";
}

BalancedRows balanced_rows(const ChoiceInputs& inputs, std::int64_t rank, std::int64_t num_tokens) {
  const std::int64_t routes = checked_mul(num_tokens, inputs.top_k);  // of a rank
  checked_mul(routes, inputs.num_ranks);
  const auto rows_from = [&](std::int64_t first_rank, std::int64_t last_rank, std::int64_t local) {
    const std::int64_t turn = local * inputs.num_ranks + rank;
    return routes_before(last_rank * routes, inputs.num_experts, turn) -
           routes_before(first_rank * routes, inputs.num_experts, turn);
  };
  BalancedRows rows{
      .num_tokens = num_tokens,
      .num_local_experts = num_local_experts(inputs.num_experts, inputs.num_ranks, rank)};
  for (std::int64_t expert = 0; expert < rows.num_local_experts; ++expert) {
    const std::int64_t all = rows_from(0, inputs.num_ranks, expert);
    rows.num_rows = checked_add(rows.num_rows, all);
    rows.active_experts += all > 0 ? 1 : 0;
  }
  DISTMOE_CHECK(rows.num_rows <= std::numeric_limits<std::int32_t>::max(), kInvalidArgument,
                num_tokens, " tokens of each of ", inputs.num_ranks, " ranks make ", rows.num_rows,
                " rows on rank ", rank, "; legal is 2147483647 at most");
  // Groups stand as the routing kernels list them.
  const auto for_experts = [&](std::int64_t first_rank, std::int64_t end_rank, const auto& use) {
    for (std::int64_t expert = 0; expert < rows.num_local_experts; ++expert) {
      use(rows_from(first_rank, end_rank, expert), rows_from(rank, rank + 1, expert));
    }
  };
  for_experts(0, inputs.num_ranks, [&](std::int64_t all, std::int64_t own) {
    rows.pulled_rows += all - own;
    add_group(rows.w2, all, false);
  });
  if (groups_per_expert(Product::kW13, inputs.num_ranks, rows.num_local_experts, rows.num_rows) ==
      1) {
    for_experts(0, inputs.num_ranks,
                [&](std::int64_t all, std::int64_t own) { add_group(rows.w13, all, all > own); });
    return rows;
  }
  const auto add_part = [&](std::int64_t first_rank, std::int64_t end_rank, bool waits_for_pull) {
    for_experts(first_rank, end_rank, [&](std::int64_t part, std::int64_t) {
      add_group(rows.w13, part, waits_for_pull);
    });
  };
  add_part(rank, rank + 1, false);
  add_part(0, rank, true);
  add_part(rank + 1, inputs.num_ranks, true);
  return rows;
}

double rows_per_expert(const ChoiceInputs& inputs, std::int64_t num_tokens) {
  return static_cast<double>(inputs.num_ranks) * static_cast<double>(num_tokens) *
         static_cast<double>(inputs.top_k) / static_cast<double>(inputs.num_experts);
}

ProductLoad product_load(Product product, const ChoiceInputs& inputs, const ContextChoice& choice,
                         const BalancedRows& rows) {
  const bool is_w13 = product == Product::kW13;
  ProductLoad load{
      .product = product,
      .m = is_w13 ? checked_mul(2, inputs.intermediate_dim) : inputs.hidden_dim,
      .k = is_w13 ? inputs.hidden_dim : inputs.intermediate_dim,
  };
  load.weight_tiles = ceil_div(load.m, kWeightRows);
  load.stages = ceil_div(load.k, kStageK);
  load.cluster_tiles = checked_mul(rows.of(product).num_pairs, load.weight_tiles);
  load.waves = ceil_div(load.cluster_tiles, choice.clusters());
  if (load.waves > 0) {
    load.fill = static_cast<double>(load.cluster_tiles) /
                (static_cast<double>(load.waves) * static_cast<double>(choice.clusters()));
  }
  load.flops = checked_product(2, rows.num_rows, load.m, load.k);
  // A warpgroup whose weight rows all lie beyond the matrix computes nothing.
  const std::int64_t computed_m =
      checked_mul(ceil_div(load.m, kWeightRowsPerWarpgroup), kWeightRowsPerWarpgroup);
  load.computed_flops = checked_product(2, rows.of(product).computed_rows, computed_m,
                                        checked_mul(load.stages, kStageK));
  const std::int64_t expert_bytes = checked_product(kElementBytes, load.m, load.k);
  load.weight_bytes = checked_mul(rows.active_experts, expert_bytes);
  load.weight_load_bytes = checked_mul(rows.of(product).num_pairs, expert_bytes);
  return load;
}

std::vector<NamedLaunch> forward_launches(const ChoiceInputs& inputs, const ContextChoice& choice,
                                          std::int64_t rank, std::int64_t num_tokens,
                                          std::int64_t max_tokens) {
  const bool is_few = choose_few_rows(inputs, choice, num_tokens).has_value();
  const NamedLaunch few_rows = {kFewRowsName, few_rows_launch(choice.persistent_blocks)};
  if (is_few && inputs.num_ranks == 1) return {few_rows};
  const std::int64_t num_local = num_local_experts(inputs.num_experts, inputs.num_ranks, rank);
  const std::int64_t num_chunks = checked_mul(inputs.num_ranks, route_chunks_per_rank(max_tokens));
  std::vector<NamedLaunch> launches;
  const auto add = [&](bool is_launched, const char* kernel, const LaunchShape& shape) {
    if (is_launched) launches.push_back({kernel, shape});
  };
  if (joins_publish_and_route(inputs, max_tokens)) {
    add(true, "publish_route",
        publish_route_launch({.num_ranks = inputs.num_ranks,
                              .max_tokens = max_tokens,
                              .top_k = inputs.top_k,
                              .num_experts = inputs.num_experts,
                              .num_local_experts = num_local,
                              .has_scores = inputs.combine == Combine::kPerRank},
                             num_tokens, kElementBytes * inputs.hidden_dim, choice.publish_blocks));
  } else {
    add(true, "begin", kSingleThreadLaunch);
    add(num_tokens > 0, "publish", publish_launch(choice.publish_blocks));
    add(num_tokens > 0, "note", kSingleThreadLaunch);
    add(inputs.num_ranks > 1, "peer_barrier", kPeerBarrierLaunch);
    add(true, "count", route_count_launch(num_chunks, inputs.num_experts));
    add(true, "scan", kRouteScanLaunch);
    add(true, "place", route_place_launch(num_chunks, num_local));
  }
  add(is_few && num_local > 0, few_rows.kernel, few_rows.shape);
  if (!is_few || !bounds_few_rows(inputs, max_tokens)) {
    for (const Product product : {Product::kW13, Product::kW2}) {
      add(num_local > 0, product_name(product), grouped_gemm_launch(choice.persistent_blocks));
    }
  }
  const bool per_rank = inputs.combine == Combine::kPerRank;
  add(per_rank && inputs.num_ranks > 1, "rank_sums",
      rank_sums_launch(choice.rank_sum_blocks, inputs.top_k));
  add(inputs.num_ranks > 1 && !joins_meeting_and_combine(inputs, choice, num_tokens),
      "peer_barrier", kPeerBarrierLaunch);
  if (per_rank) {
    add(num_tokens > 0, "combine_ranks",
        combine_ranks_launch(num_tokens, inputs.top_k, inputs.hidden_dim));
  } else {
    add(num_tokens > 0, "combine", combine_launch(num_tokens, inputs.top_k, inputs.hidden_dim));
  }
  add(num_tokens == 0, "keep_fault", kSingleThreadLaunch);
  return launches;
}

}  // namespace distmoe::cuda
