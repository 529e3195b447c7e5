// SPDX-License-Identifier: Apache-2.0
//
// The candidate matrix libraries on the products of a layer: all rows of T=1024 tokens as one
// matrix, and the rows of one expert. Arguments: m, n, k, threads.
#include <benchmark/benchmark.h>

#include "dense_library.hpp"
#include "threads.hpp"

namespace distmoe::bench {
namespace {

void dense_product(benchmark::State& state, const DenseLibrary& library) {
  const DenseShape shape{state.range(0), state.range(1), state.range(2)};
  const auto num_threads = static_cast<int>(state.range(3));
  const auto product = library.make(shape, num_threads);
  const auto run = [&] { on_threads(num_threads, [&](int part) { product->run(part); }); };
  run();
  for (auto _ : state) run();
  state.counters["FLOP/s"] =
      benchmark::Counter(shape.flops(), benchmark::Counter::kIsIterationInvariantRate);
}

void register_benchmarks() {
  for (const DenseLibrary& library : dense_libraries()) {
    benchmark::RegisterBenchmark(library.name.c_str(), dense_product, library)
        ->ArgNames({"m", "n", "k", "threads"})
        ->Args({8192, 1536, 2048, 1})
        ->Args({8192, 2048, 768, 1})
        ->Args({8192, 1536, 2048, 2})
        ->Args({8192, 2048, 768, 2})
        ->Args({128, 1536, 2048, 1})
        ->Args({128, 2048, 768, 1})
        ->Args({8, 1536, 2048, 1})
        ->Args({8, 2048, 768, 1})
        ->Unit(benchmark::kMillisecond)
        ->MeasureProcessCPUTime()
        ->UseRealTime();
  }
}

}  // namespace
}  // namespace distmoe::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  distmoe::bench::register_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
