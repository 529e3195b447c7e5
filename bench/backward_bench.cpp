// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward at D=2048 F=768 E=64 K=8 on one rank. Arguments: tokens, threads. The weight
// gradients are BF16, overwritten. Each time is of the forward or of the backward alone.
#include <benchmark/benchmark.h>

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "bench/random_values.hpp"
#include "distmoe/routed_experts_backward.hpp"
#include "layer_problem.hpp"

namespace distmoe::bench {
namespace {

/// Tokens that are routed uniformly at random, K distinct experts each.
struct RoutedBatch {
  std::vector<BF16> x;
  std::vector<std::int32_t> ids;
  std::vector<float> scores;

  RoutedBatch(const LayerShape& shape, std::int64_t num_tokens)
      : x(static_cast<std::size_t>(num_tokens * shape.hidden_dim)) {
    tools::fill_random(std::span(x), 3);
    tools::RandomBits random(4);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      std::set<std::int32_t> chosen;
      while (std::ssize(chosen) < shape.top_k) {
        chosen.insert(
            static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(shape.num_experts))));
      }
      ids.insert(ids.end(), chosen.begin(), chosen.end());
    }
    scores.assign(ids.size(), 0.125F);
  }
};

/// One rank with its tokens, outputs and gradients.
class TrainingProblem {
 public:
  TrainingProblem(const LayerWeights& weights, std::int64_t num_tokens, int num_threads, bool saves)
      : weights_(weights), num_tokens_(num_tokens), batch_(weights.shape(), num_tokens) {
    const LayerShape& shape = weights.shape();
    const Config config{
        .max_tokens = num_tokens,
        .hidden_dim = shape.hidden_dim,
        .intermediate_dim = shape.intermediate_dim,
        .top_k = shape.top_k,
        .num_experts = shape.num_experts,
        .max_moe_layers_per_activation_slot = 1,
        .device_scratch_capacity_factor = 1.0,
        .activation_slot_capacity_factor = saves ? std::optional(1.0) : std::optional<double>()};
    context_ = std::make_unique<Context>(Context::create(config, {.num_threads = num_threads}));
    y_.resize(batch_.x.size());
    grad_x_.resize(batch_.x.size());
    grad_scores_.resize(batch_.scores.size());
    const auto experts = static_cast<std::size_t>(shape.num_experts);
    grad_w13_.resize(experts * static_cast<std::size_t>(shape.weights_per_expert()) / 3 * 2);
    grad_w2_.resize(grad_w13_.size() / 2);
  }

  SavedForward forward() {
    const std::int64_t top_k = weights_.shape().top_k;
    const RoutedInput input{
        .x_TD = rows(batch_.x),
        .topk_ids_TK = {batch_.ids.data(), DType::kI32, {num_tokens_, top_k}},
        .topk_scores_TK = {batch_.scores.data(), DType::kF32, {num_tokens_, top_k}}};
    return saving_routed_experts(*context_, input, all_experts(), rows(y_));
  }

  void backward(SavedForward saved) {
    const LayerShape& shape = weights_.shape();
    const std::int64_t experts = shape.num_experts;
    const RoutedGradients gradients{
        .grad_x_TD = rows(grad_x_),
        .grad_scores_TK = {grad_scores_.data(), DType::kF32, {num_tokens_, shape.top_k}},
        .grad_w13_L2FD = {.tensor = {grad_w13_.data(),
                                     DType::kBF16,
                                     {experts, 2 * shape.intermediate_dim, shape.hidden_dim}}},
        .grad_w2_LDF = {.tensor = {grad_w2_.data(),
                                   DType::kBF16,
                                   {experts, shape.hidden_dim, shape.intermediate_dim}}}};
    // dy = x: its values do not change the time.
    routed_experts_backward(*context_, std::move(saved), rows(batch_.x), all_experts(), gradients);
  }

 private:
  ExpertWeights all_experts() const { return weights_.of(0, weights_.shape().num_experts); }
  TensorView rows(std::vector<BF16>& values) const {
    return {values.data(), DType::kBF16, {num_tokens_, weights_.shape().hidden_dim}};
  }

  const LayerWeights& weights_;
  std::int64_t num_tokens_;
  RoutedBatch batch_;
  std::unique_ptr<Context> context_;
  std::vector<BF16> y_, grad_x_, grad_w13_, grad_w2_;
  std::vector<float> grad_scores_;
};

const LayerWeights& weights() {
  static const LayerWeights instance{LayerShape{}};
  return instance;
}

void forward(benchmark::State& state, bool saves) {
  TrainingProblem problem(weights(), state.range(0), static_cast<int>(state.range(1)), saves);
  problem.backward(problem.forward());
  for (auto _ : state) {
    SavedForward saved = problem.forward();
    state.PauseTiming();
    problem.backward(std::move(saved));
    state.ResumeTiming();
  }
}

void backward(benchmark::State& state, bool saves) {
  TrainingProblem problem(weights(), state.range(0), static_cast<int>(state.range(1)), saves);
  problem.backward(problem.forward());
  for (auto _ : state) {
    state.PauseTiming();
    SavedForward saved = problem.forward();
    state.ResumeTiming();
    problem.backward(std::move(saved));
  }
  state.counters["FLOP/s"] = benchmark::Counter(2 * weights().shape().flops(state.range(0)),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"T", "threads"})
      ->ArgsProduct({{64, 1024, 4096}, {1, 2}})
      ->Unit(benchmark::kMillisecond)
      ->UseRealTime();
}

BENCHMARK_CAPTURE(forward, saved, true)->Apply(sizes);
BENCHMARK_CAPTURE(backward, saved, true)->Apply(sizes);
BENCHMARK_CAPTURE(backward, recomputed, false)->Apply(sizes);

}  // namespace
}  // namespace distmoe::bench

BENCHMARK_MAIN();
