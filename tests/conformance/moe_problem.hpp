// SPDX-License-Identifier: Apache-2.0
//
// Random MoE layers for the conformance suite: the activations, the routing and the weights of the
// whole group, in one canonical form that no backend uses. All values are functions of the seed, so
// that every rank, process and run has the same.
#pragma once

#include <cstdint>
#include <vector>

#include "distmoe/config.hpp"
#include "formats/bf16.hpp"

namespace distmoe::conformance {

/// A well mixed number of up to four keys.
std::uint64_t mix(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0);
/// Uniform in (-1, 1), never 0.
double uniform(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0, std::uint64_t d = 0);

struct MoeShape {
  std::int64_t num_tokens = 0;  ///< over all ranks
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
};

enum class RoutePattern {
  kDistinct,     ///< K different experts a token
  kMixed,        ///< duplicates, -1, tokens without any route, experts without rows
  kOneExpert,    ///< one expert takes every route
  kAllDisabled,  ///< -1 everywhere
};

/// One layer and the tokens of the whole group. Empty biases mean none.
struct MoeProblem {
  MoeShape shape;
  Activation activation = Activation::kSwiGLU;
  double alpha = 1.702;
  double limit = 7.0;

  std::vector<BF16> x;            ///< [T, D]
  std::vector<std::int64_t> ids;  ///< [T, K]
  std::vector<float> scores;      ///< [T, K], positive and negative, all distinct
  std::vector<BF16> gate;         ///< [E, F, D]
  std::vector<BF16> up;           ///< [E, F, D]
  std::vector<BF16> down;         ///< [E, D, F]
  std::vector<float> gate_bias;   ///< [E, F]
  std::vector<float> up_bias;     ///< [E, F]
  std::vector<float> down_bias;   ///< [E, D]

  std::int64_t num_routes() const { return shape.num_tokens * shape.top_k; }
  BF16* x_row(std::int64_t token) { return x.data() + token * shape.hidden_dim; }

  /// Makes scores (biases) values that BF16 holds, so that either type may carry them.
  void round_scores();
  void round_biases();
};

MoeProblem make_problem(const MoeShape& shape, RoutePattern pattern, std::uint64_t seed);
void add_biases(MoeProblem& problem, std::uint64_t seed);
/// Expert e has counts[e] rows, K = 1; of `widths` only D and F count.
MoeProblem problem_of_counts(const std::vector<int>& counts, const MoeShape& widths,
                             std::uint64_t seed);
/// Both, with the biases of the next seed.
MoeProblem make_problem_with_biases(const MoeShape& shape, RoutePattern pattern,
                                    std::uint64_t seed);

/// A layer in which every product sum is an integer that FP32 holds and every sigmoid is 1, so that
/// h1, h2 and h3 have the same bits in whatever order sums are taken; scores are as random as
/// always.
MoeProblem make_exact_problem(const MoeShape& shape, RoutePattern pattern, std::uint64_t seed);

/// A layer whose x = 1 makes every gate `gate`, every up `up` and every h3 `down` times h2, with
/// scores 1, routed to expert token mod E in each slot: for values that can be computed by hand.
/// Exact where the widths are powers of two.
MoeProblem make_constant_problem(const MoeShape& shape, double gate, double up, double down);

}  // namespace distmoe::conformance
