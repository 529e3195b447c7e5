// SPDX-License-Identifier: Apache-2.0
//
// What a call of one token costs in C++, beside which python/bench/operator_overhead.py puts the
// same call from Python: D=64, F=32, E=8, K=2, one rank, one thread, the median of 10,000.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

#include "distmoe/distmoe.hpp"

namespace distmoe::bench {
namespace {

constexpr std::int64_t kHidden = 64, kInner = 32, kExperts = 8, kTopK = 2;
constexpr int kCalls = 10'000, kWarmUps = 1'000;

double median_us(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < kWarmUps; ++i) call();
  std::vector<double> times(kCalls);
  for (double& time : times) {
    const auto start = Clock::now();
    call();
    time = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }
  std::ranges::nth_element(times, times.begin() + kCalls / 2);
  return times[kCalls / 2];
}

int run() {
  const Config config{.max_tokens = 1,
                      .hidden_dim = kHidden,
                      .intermediate_dim = kInner,
                      .top_k = kTopK,
                      .num_experts = kExperts,
                      .max_moe_layers_per_activation_slot = 1,
                      .activation_slot_capacity_factor = 1.0};
  Context context = Context::create(config, {.num_threads = 1});
  const std::vector<std::uint16_t> x(kHidden, 0x3F80), w13(kExperts * 2 * kInner * kHidden, 0x3C00),
      w2(kExperts * kHidden * kInner, 0x3C00);
  const std::vector<std::int64_t> ids{3, 5};
  const std::vector<float> scores{.6F, .4F};
  std::vector<std::uint16_t> y(kHidden);
  const RoutedInput input{{x.data(), DType::kBF16, {1, kHidden}},
                          {ids.data(), DType::kI64, {1, kTopK}},
                          {scores.data(), DType::kF32, {1, kTopK}}};
  const ExpertWeights weights{{w13.data(), DType::kBF16, {kExperts, 2 * kInner, kHidden}},
                              {w2.data(), DType::kBF16, {kExperts, kHidden, kInner}}};
  const TensorView y_TD(y.data(), DType::kBF16, {1, kHidden});
  std::printf("forward_us %.2f\n",
              median_us([&] { routed_experts(context, input, weights, y_TD); }));
  std::printf("saving_forward_us %.2f\n", median_us([&] {
                context.discard(saving_routed_experts(context, input, weights, y_TD));
              }));
  return 0;
}

}  // namespace
}  // namespace distmoe::bench

int main() { return distmoe::bench::run(); }
