// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_problem.hpp"

#include <algorithm>
#include <cmath>

namespace distmoe::conformance {
namespace {

enum Stream : std::uint64_t {
  kX = 1,
  kIds,
  kScores,
  kGate,
  kUp,
  kDown,
  kGateBias,
  kUpBias,
  kDownBias
};

/// Of an exact problem: columns that can move a gate by 3 each, so that it stays above 40.
constexpr std::size_t kExactGateColumns = 8;

std::size_t count(std::int64_t a, std::int64_t b, std::int64_t c = 1) {
  return static_cast<std::size_t>(a * b * c);
}

std::vector<BF16> random_rows(std::size_t size, double scale, std::uint64_t seed, Stream stream) {
  std::vector<BF16> values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = to_bf16(scale * uniform(seed, stream, i));
  return values;
}

std::vector<float> random_floats(std::size_t size, double scale, std::uint64_t seed,
                                 Stream stream) {
  std::vector<float> values(size);
  for (std::size_t i = 0; i < size; ++i) {
    values[i] = static_cast<float>(scale * uniform(seed, stream, i));
  }
  return values;
}

std::int64_t random_id(const MoeShape& shape, std::uint64_t seed, std::int64_t route) {
  const std::uint64_t bits = mix(seed, kIds, static_cast<std::uint64_t>(route));
  return static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(shape.num_experts));
}

/// K different experts: a random start and a random step through the experts not taken yet.
void distinct_ids(const MoeShape& shape, std::uint64_t seed, std::int64_t token,
                  std::int64_t* ids) {
  std::int64_t candidate = 0;
  for (std::int64_t k = 0; k < shape.top_k; ++k) {
    candidate = (candidate + random_id(shape, seed, token * shape.top_k + k)) % shape.num_experts;
    while (std::find(ids, ids + k, candidate) != ids + k) {
      candidate = (candidate + 1) % shape.num_experts;
    }
    ids[k] = candidate;
  }
}

void mixed_ids(const MoeShape& shape, std::uint64_t seed, std::int64_t token, std::int64_t* ids) {
  const bool is_idle = mix(seed, kIds, 1u << 20, static_cast<std::uint64_t>(token)) % 9 == 4;
  for (std::int64_t k = 0; k < shape.top_k; ++k) {
    const std::int64_t route = token * shape.top_k + k;
    const std::uint64_t choice = mix(seed, kIds, 1u << 21, static_cast<std::uint64_t>(route)) % 8;
    std::int64_t id = random_id(shape, seed, route);
    if (shape.num_experts > 4 && id % 5 == 3) --id;  // such experts get no row
    if (choice == 0) id = -1;
    if (choice <= 2 && choice > 0 && k > 0) id = ids[k - 1];
    ids[k] = is_idle ? -1 : id;
  }
}

}  // namespace

std::uint64_t mix(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t value = 0x9E3779B97F4A7C15u;
  for (const std::uint64_t part : {a, b, c, d}) {
    value = (value ^ part) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 29)) * 0x94D049BB133111EBu;
    value ^= value >> 32;
  }
  return value;
}

double uniform(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  const auto bits = static_cast<std::int64_t>(mix(a, b, c, d) >> 12);  // 52 bits
  return static_cast<double>(2 * bits + 1) * 0x1p-52 - 1.0;
}

void MoeProblem::round_scores() {
  for (float& score : scores) score = to_float(to_bf16(score));
}

void MoeProblem::round_biases() {
  for (std::vector<float>* biases : {&gate_bias, &up_bias, &down_bias}) {
    for (float& bias : *biases) bias = to_float(to_bf16(bias));
  }
}

MoeProblem make_problem(const MoeShape& shape, RoutePattern pattern, std::uint64_t seed) {
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  MoeProblem problem;
  problem.shape = shape;
  problem.x = random_rows(count(shape.num_tokens, d), 1.7, seed, kX);
  problem.scores = random_floats(count(shape.num_tokens, shape.top_k), 1.0, seed, kScores);
  // Gate and up have a spread of about 1.7, so that the sigmoid bends and a limit of 2 bites.
  const double w13_scale = 3.0 / std::sqrt(static_cast<double>(d));
  const double w2_scale = 1.7 / std::sqrt(static_cast<double>(f));
  problem.gate = random_rows(count(shape.num_experts, f, d), w13_scale, seed, kGate);
  problem.up = random_rows(count(shape.num_experts, f, d), w13_scale, seed, kUp);
  problem.down = random_rows(count(shape.num_experts, f, d), w2_scale, seed, kDown);
  problem.ids.assign(count(shape.num_tokens, shape.top_k), -1);
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    std::int64_t* ids = problem.ids.data() + token * shape.top_k;
    if (pattern == RoutePattern::kDistinct) distinct_ids(shape, seed, token, ids);
    if (pattern == RoutePattern::kMixed) mixed_ids(shape, seed, token, ids);
    if (pattern == RoutePattern::kOneExpert) {
      std::fill_n(ids, shape.top_k, shape.num_experts / 2);
    }
  }
  return problem;
}

MoeProblem problem_of_counts(const std::vector<int>& counts, const MoeShape& widths,
                             std::uint64_t seed) {
  std::vector<std::int64_t> ids;
  for (std::size_t expert = 0; expert < counts.size(); ++expert) {
    ids.insert(ids.end(), static_cast<std::size_t>(counts[expert]),
               static_cast<std::int64_t>(expert));
  }
  MoeProblem problem = make_problem({.num_tokens = std::ssize(ids),
                                     .hidden_dim = widths.hidden_dim,
                                     .intermediate_dim = widths.intermediate_dim,
                                     .num_experts = std::ssize(counts),
                                     .top_k = 1},
                                    RoutePattern::kDistinct, seed);
  problem.ids = ids;
  return problem;
}

void add_biases(MoeProblem& problem, std::uint64_t seed) {
  const MoeShape& shape = problem.shape;
  const std::size_t ef = count(shape.num_experts, shape.intermediate_dim);
  problem.gate_bias = random_floats(ef, 1.0, seed, kGateBias);
  problem.up_bias = random_floats(ef, 1.0, seed, kUpBias);
  problem.down_bias =
      random_floats(count(shape.num_experts, shape.hidden_dim), 1.0, seed, kDownBias);
}

MoeProblem make_problem_with_biases(const MoeShape& shape, RoutePattern pattern,
                                    std::uint64_t seed) {
  MoeProblem problem = make_problem(shape, pattern, seed);
  add_biases(problem, seed + 1);
  return problem;
}

MoeProblem make_exact_problem(const MoeShape& shape, RoutePattern pattern, std::uint64_t seed) {
  MoeProblem problem = make_problem(shape, pattern, seed);
  // An integer in [-limit, limit], 0 more often than not.
  const auto sparse = [&](Stream stream, std::size_t at, std::int64_t limit) {
    const std::uint64_t bits = mix(seed, stream, at);
    if (bits % 4 != 0) return 0.0;
    return static_cast<double>(static_cast<std::int64_t>((bits >> 8) % (2 * limit + 1)) - limit);
  };
  const auto width = static_cast<std::size_t>(shape.hidden_dim);
  for (std::size_t i = 0; i < problem.x.size(); ++i) {
    // The first column carries the gate to where its sigmoid is 1.
    problem.x[i] = to_bf16(i % width == 0 ? 1.0 : sparse(kX, i, 3));
  }
  for (std::size_t i = 0; i < problem.gate.size(); ++i) {
    const bool is_sparse_column = i % width < kExactGateColumns;
    problem.gate[i] = to_bf16(i % width == 0 ? 64.0 : is_sparse_column ? sparse(kGate, i, 1) : 0.0);
    problem.up[i] = to_bf16(sparse(kUp, i, 2));
  }
  for (std::size_t i = 0; i < problem.down.size(); ++i) {
    problem.down[i] = to_bf16(sparse(kDown, i, 2));
  }
  return problem;
}

MoeProblem make_constant_problem(const MoeShape& shape, double gate, double up, double down) {
  MoeProblem problem;
  problem.shape = shape;
  problem.x.assign(count(shape.num_tokens, shape.hidden_dim), to_bf16(1.0));
  problem.scores.assign(count(shape.num_tokens, shape.top_k), 1.0f);
  const std::size_t matrix = count(shape.num_experts, shape.intermediate_dim, shape.hidden_dim);
  const auto width = static_cast<double>(shape.hidden_dim);
  problem.gate.assign(matrix, to_bf16(gate / width));
  problem.up.assign(matrix, to_bf16(up / width));
  problem.down.assign(matrix, to_bf16(down / static_cast<double>(shape.intermediate_dim)));
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    problem.ids.insert(problem.ids.end(), static_cast<std::size_t>(shape.top_k),
                       token % shape.num_experts);
  }
  return problem;
}

}  // namespace distmoe::conformance
