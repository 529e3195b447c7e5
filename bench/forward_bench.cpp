// SPDX-License-Identifier: Apache-2.0
//
// The forward at D=2048 F=768 E=64 K=8. Arguments: tokens of all ranks, ranks, threads of a rank;
// of one rank also with weights that are prepared for a low precision, and of a training context
// that keeps everything in its slot.
#include <benchmark/benchmark.h>

#include "layer_problem.hpp"
#include "plan/option_names.hpp"

namespace distmoe::bench {
namespace {

void forward(benchmark::State& state) {
  static const LayerWeights weights{LayerShape{}};
  const std::int64_t num_tokens = state.range(0);
  ForwardProblem problem(weights, num_tokens, static_cast<int>(state.range(1)),
                         static_cast<int>(state.range(2)));
  problem.run();  // touches the context's memory and fills the library's cache of kernels
  for (auto _ : state) problem.run();
  state.counters["FLOP/s"] = benchmark::Counter(weights.shape().flops(num_tokens),
                                                benchmark::Counter::kIsIterationInvariantRate);
  state.counters["weights"] = benchmark::Counter(
      static_cast<double>(problem.touched_weight_bytes()),
      benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::OneK::kIs1000);
}

void run_coded(benchmark::State& state, Purpose purpose) {
  constexpr int kThreads = 2;
  const LayerWeights weights{LayerShape{}, static_cast<Precision>(state.range(1)), purpose};
  ForwardProblem problem(weights, state.range(0), 1, kThreads);
  problem.run();
  for (auto _ : state) problem.run();
  state.SetLabel(option_name(weights.precision()));
}

void forward_coded(benchmark::State& state) { run_coded(state, Purpose::kInference); }
void forward_saving(benchmark::State& state) { run_coded(state, Purpose::kTraining); }

BENCHMARK(forward_coded)
    ->ArgNames({"T", "precision"})
    ->ArgsProduct({{16, 64, 256, 1024},
                   {static_cast<int>(Precision::kBF16), static_cast<int>(Precision::kMXFP8),
                    static_cast<int>(Precision::kNVFP4), static_cast<int>(Precision::kMXFP4)}})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime();

BENCHMARK(forward_saving)
    ->ArgNames({"T", "precision"})
    ->ArgsProduct({{16, 64, 256, 1024},
                   {static_cast<int>(Precision::kBF16), static_cast<int>(Precision::kMXFP8)}})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime();

BENCHMARK(forward)
    ->ArgNames({"T", "ranks", "threads"})
    ->ArgsProduct({{1, 16, 64, 256, 1024, 4096}, {1}, {1, 2}})
    ->ArgsProduct({{64, 1024, 4096}, {2}, {1}})
    ->Unit(benchmark::kMillisecond)
    ->MeasureProcessCPUTime()
    ->UseRealTime();

}  // namespace
}  // namespace distmoe::bench

BENCHMARK_MAIN();
