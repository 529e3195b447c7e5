// SPDX-License-Identifier: Apache-2.0
#include "layer_problem.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "bench/random_values.hpp"
#include "threads.hpp"

namespace distmoe::bench {
namespace {

/// K distinct experts, uniformly.
void choose_experts(tools::RandomBits& random, std::int64_t num_experts,
                    std::span<std::int32_t> ids) {
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    do {
      *id = static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(num_experts)));
    } while (std::find(ids.begin(), id, *id) != id);
  }
}

}  // namespace

LayerWeights::LayerWeights(const LayerShape& shape, Precision precision, Purpose purpose)
    : shape_(shape),
      precision_(precision),
      purpose_(purpose),
      w13_(static_cast<std::size_t>(shape.num_experts * 2 * shape.intermediate_dim *
                                    shape.hidden_dim)),
      w2_(w13_.size() / 2) {
  // Keeps the variance of what goes in, as trained layers do.
  tools::fill_random(std::span(w13_), 1, std::sqrt(3.0f / static_cast<float>(shape.hidden_dim)));
  tools::fill_random(std::span(w2_), 2,
                     std::sqrt(3.0f / static_cast<float>(shape.intermediate_dim)));
  if (precision == Precision::kBF16) return;
  const ExpertWeights all = of(0, shape.num_experts);
  const BlockScaledConfig config{.format = precision, .inference = purpose == Purpose::kInference};
  prepared_w13_ = prepare_block_scaled_weight(all.w13_L2FD, config);
  prepared_w2_ = prepare_block_scaled_weight(all.w2_LDF, config);
  w13_ = w2_ = {};
}

ExpertWeights LayerWeights::of(std::int64_t first_expert, std::int64_t num_experts) const {
  if (prepared_w13_.view().is_given()) {
    return {.prepared_w13 = prepared_w13_.view(), .prepared_w2 = prepared_w2_.view()};
  }
  const std::int64_t w2_size = shape_.hidden_dim * shape_.intermediate_dim;
  return {.w13_L2FD = {w13_.data() + first_expert * 2 * w2_size,
                       DType::kBF16,
                       {num_experts, 2 * shape_.intermediate_dim, shape_.hidden_dim}},
          .w2_LDF = {w2_.data() + first_expert * w2_size,
                     DType::kBF16,
                     {num_experts, shape_.hidden_dim, shape_.intermediate_dim}}};
}

ForwardProblem::ForwardProblem(const LayerWeights& weights, std::int64_t num_tokens, int num_ranks,
                               int threads_per_rank)
    : weights_(weights), ranks_(static_cast<std::size_t>(num_ranks)) {
  const LayerShape& shape = weights.shape();
  for (int index = 0; index < num_ranks; ++index) {
    const std::int64_t tokens =
        num_tokens * (index + 1) / num_ranks - num_tokens * index / num_ranks;
    Rank& rank = ranks_[static_cast<std::size_t>(index)];
    rank.x.resize(static_cast<std::size_t>(tokens * shape.hidden_dim));
    rank.y.resize(rank.x.size());
    rank.ids.resize(static_cast<std::size_t>(tokens * shape.top_k));
    rank.scores.resize(rank.ids.size());
  }
  fill_inputs();

  Config config{.max_tokens = (num_tokens + num_ranks - 1) / num_ranks,
                .hidden_dim = shape.hidden_dim,
                .intermediate_dim = shape.intermediate_dim,
                .top_k = shape.top_k,
                .num_experts = shape.num_experts,
                .max_moe_layers_per_activation_slot = 1,
                .precision = weights.precision(),
                .inference = weights.purpose() == Purpose::kInference};
  if (!config.inference) config.activation_slot_capacity_factor = num_ranks;
  const auto group = make_thread_group(num_ranks);
  on_threads(num_ranks, [&](int index) {
    const auto position = static_cast<std::size_t>(index);
    ranks_[position].context = std::make_unique<Context>(
        Context::create(config, group[position], {.num_threads = threads_per_rank}));
  });
}

void ForwardProblem::fill_inputs() {
  const LayerShape& shape = weights_.shape();
  // The same tokens however many ranks share them.
  tools::RandomBits random(3);
  for (Rank& rank : ranks_) {
    for (BF16& value : rank.x) value = to_bf16(random.unit());
    for (std::size_t route = 0; route < rank.ids.size();
         route += static_cast<std::size_t>(shape.top_k)) {
      choose_experts(random, shape.num_experts,
                     std::span(rank.ids).subspan(route, static_cast<std::size_t>(shape.top_k)));
    }
    for (float& score : rank.scores) score = 0.125f * (1.0f + 0.5f * random.unit());
  }
}

void ForwardProblem::run() {
  on_threads(static_cast<int>(ranks_.size()),
             [&](int index) { call(ranks_[static_cast<std::size_t>(index)]); });
}

void ForwardProblem::call(Rank& rank) {
  const LayerShape& shape = weights_.shape();
  const auto tokens = static_cast<std::int64_t>(rank.ids.size()) / shape.top_k;
  Context& context = *rank.context;
  const RoutedInput input{
      .x_TD = {rank.x.data(), DType::kBF16, {tokens, shape.hidden_dim}},
      .topk_ids_TK = {rank.ids.data(), DType::kI32, {tokens, shape.top_k}},
      .topk_scores_TK = {rank.scores.data(), DType::kF32, {tokens, shape.top_k}}};
  const ExpertWeights weights = weights_.of(context.first_expert(), context.num_local_experts());
  const TensorView y{rank.y.data(), DType::kBF16, {tokens, shape.hidden_dim}};
  if (weights_.purpose() == Purpose::kInference) {
    routed_experts(context, input, weights, y);
  } else {
    context.discard(saving_routed_experts(context, input, weights, y));
  }
}

std::int64_t ForwardProblem::touched_weight_bytes() const {
  std::set<std::int32_t> experts;
  for (const Rank& rank : ranks_) experts.insert(rank.ids.begin(), rank.ids.end());
  return static_cast<std::int64_t>(experts.size()) * weights_.shape().weights_per_expert() *
         static_cast<std::int64_t>(sizeof(BF16));
}

}  // namespace distmoe::bench
