// SPDX-License-Identifier: Apache-2.0
//
// A layer with random weights and tokens that are routed uniformly at random, K distinct experts
// each, and the group of ranks that computes it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"
#include "formats/bf16.hpp"

namespace distmoe::bench {

struct LayerShape {
  std::int64_t hidden_dim = 2048;
  std::int64_t intermediate_dim = 768;
  std::int64_t num_experts = 64;
  std::int64_t top_k = 8;

  std::int64_t weights_per_expert() const { return 3 * hidden_dim * intermediate_dim; }
  /// Of the three products of every route of `num_tokens` tokens.
  double flops(std::int64_t num_tokens) const {
    return 2.0 * static_cast<double>(num_tokens * top_k) *
           static_cast<double>(weights_per_expert());
  }
};

enum class Purpose { kInference, kTraining };

/// The weights of all experts.
class LayerWeights {
 public:
  /// BF16, or prepared for the purpose.
  explicit LayerWeights(const LayerShape& shape, Precision precision = Precision::kBF16,
                        Purpose purpose = Purpose::kInference);
  const LayerShape& shape() const { return shape_; }
  Precision precision() const { return precision_; }
  Purpose purpose() const { return purpose_; }
  /// Of all experts where they are prepared.
  ExpertWeights of(std::int64_t first_expert, std::int64_t num_experts) const;

 private:
  LayerShape shape_;
  Precision precision_;
  Purpose purpose_;
  std::vector<BF16> w13_;
  std::vector<BF16> w2_;
  PreparedWeight prepared_w13_;
  PreparedWeight prepared_w2_;
};

/// `num_tokens` tokens, as evenly as possible over `num_ranks` ranks of this process.
class ForwardProblem {
 public:
  ForwardProblem(const LayerWeights& weights, std::int64_t num_tokens, int num_ranks,
                 int threads_per_rank);

  /// One call on every rank: routed_experts, or in training saving_routed_experts, whose slot
  /// has room for everything, without a backward.
  void run();
  /// Bytes of the weights of all experts that at least one token names.
  std::int64_t touched_weight_bytes() const;

 private:
  struct Rank {
    std::vector<BF16> x;
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    std::vector<BF16> y;
    std::unique_ptr<Context> context;
  };
  void fill_inputs();
  void call(Rank& rank);

  const LayerWeights& weights_;
  std::vector<Rank> ranks_;
};

}  // namespace distmoe::bench
