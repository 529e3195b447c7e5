// SPDX-License-Identifier: Apache-2.0
//
// Two ranks, threads of this process, share four experts; each brings six tokens of its own.
#include <bit>
#include <cstdio>
#include <distmoe/distmoe.hpp>
#include <random>
#include <vector>

constexpr std::int64_t P = 2, E = 4, L = E / P, T = 6, K = 2, D = 64, F = 32;
using distmoe::DType;

std::vector<std::uint16_t> random_bf16(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (auto& value : values) {  // the upper half of a float in [-0.5, 0.5)
    const float number = static_cast<float>(generator() % 2048) / 2048.0F - 0.5F;
    value = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
  }
  return values;
}

int main() {
  const distmoe::Config config{.max_tokens = T,
                               .hidden_dim = D,
                               .intermediate_dim = F,
                               .top_k = K,
                               .num_experts = E,
                               .max_moe_layers_per_activation_slot = 1,
                               .inference = true};
  const std::int32_t ids[T][K] = {{0, 1}, {2, 3}, {1, 2}, {3, 0}, {0, 2}, {1, -1}};
  const float scores[T][K] = {{.9F, .1F}, {.8F, .2F}, {.7F, .3F}, {.6F, .4F}, {.5F, .5F}, {1, 0}};
  std::vector<std::uint16_t> y(P * T * D);  // rank r writes its own T rows

  distmoe::run_thread_group(P, [&](const auto& communicator) {
    const auto rank = static_cast<unsigned>(communicator->rank());
    auto context = distmoe::Context::create(config, communicator);
    const auto x = random_bf16(T * D, rank), w13 = random_bf16(L * 2 * F * D, 10 + rank);
    const auto w2 = random_bf16(L * D * F, 20 + rank);
    distmoe::routed_experts(
        context,
        {{x.data(), DType::kBF16, {T, D}},
         {ids, DType::kI32, {T, K}},
         {scores, DType::kF32, {T, K}}},
        {{w13.data(), DType::kBF16, {L, 2 * F, D}}, {w2.data(), DType::kBF16, {L, D, F}}},
        {y.data() + rank * T * D, DType::kBF16, {T, D}});
  });
  for (std::size_t row = 0; row < P * T; ++row) {
    const auto first = std::bit_cast<float>(std::uint32_t{y[row * D]} << 16);
    std::printf("rank %zu token %zu y[0] = %.4f\n", row / T, row % T, first);
  }
}
