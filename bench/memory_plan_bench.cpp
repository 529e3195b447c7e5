// SPDX-License-Identifier: Apache-2.0
//
// How long a plan takes, and a save-or-recompute decision with its rewind. docs/memory-plan.md
#include <benchmark/benchmark.h>

#include <vector>

#include "distmoe/memory_plan.hpp"
#include "plan/slot_planner.hpp"

namespace distmoe {
namespace {

/// The check value of the memory plan's page.
Config large_config() {
  return {.max_tokens = 4096,
          .hidden_dim = 4096,
          .intermediate_dim = 14336,
          .top_k = 8,
          .num_experts = 128,
          .max_moe_layers_per_activation_slot = 32,
          .device_scratch_capacity_factor = 1.5,
          .activation_slot_capacity_factor = 1.0,
          .host_scratch = HostScratch{}};
}

void plan(benchmark::State& state) {
  const Config config = large_config();
  for (auto _ : state) benchmark::DoNotOptimize(plan_memory(config, 16));
}
BENCHMARK(plan)->Unit(benchmark::kMicrosecond);

void decide(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0));
  const Config config = large_config();
  const SlotLimits limits{layer_dims(config), config.max_tokens,
                          plan_memory(config, ranks).slot_bytes, ranks, 0};
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(ranks), config.max_tokens);
  const std::vector<std::int64_t> rows(static_cast<std::size_t>(ranks),
                                       config.max_tokens * config.top_k);
  std::vector<std::int64_t> saved(tokens.size());
  std::vector<std::int64_t> before(tokens.size());
  SlotState slot;
  SavedLayer layer;
  for (auto _ : state) {
    push_layer(limits, 32, {tokens.data(), rows.data()}, {&slot, saved.data()}, before.data(),
               layer);
    pop_layer(limits, layer, before.data(), {&slot, saved.data()});
    benchmark::DoNotOptimize(slot);
  }
}
BENCHMARK(decide)->Arg(8)->Arg(64)->Unit(benchmark::kNanosecond);

}  // namespace
}  // namespace distmoe

BENCHMARK_MAIN();
