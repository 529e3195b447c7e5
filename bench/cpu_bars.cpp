// SPDX-License-Identifier: Apache-2.0
//
// The CPU forward against what the machine can do, in one run: dense products of every candidate
// library, the memcpy rate and the forward, measured in turn, round after round, so that all see
// the same machine. Prints a table of bars; never fails. Time is wall time, or, on a machine that
// is shared, CPU time per thread (--clock cpu), which leaves out waiting.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <stdexcept>
#include <string>

#include "backend/cpu/matmul.hpp"
#include "dense_library.hpp"
#include "layer_problem.hpp"
#include "threads.hpp"

namespace distmoe::bench {
namespace {

constexpr std::int64_t kBaseTokens = 1024;
constexpr std::int64_t kManyTokens = 4096;
constexpr std::int64_t kFewTokens = 64;
constexpr int kPairs = 5;
constexpr std::size_t kCopyBytes = std::size_t{512} << 20;

struct Options {
  int rounds = 9;
  int threads = available_threads();
  bool use_cpu_clock = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const std::string value = i + 1 < argc ? argv[++i] : "";
    if (name == "--rounds") {
      options.rounds = std::atoi(value.c_str());
    } else if (name == "--threads") {
      options.threads = std::atoi(value.c_str());
    } else if (name == "--clock" && (value == "wall" || value == "cpu")) {
      options.use_cpu_clock = value == "cpu";
    } else {
      throw std::invalid_argument(
          "usage: bench_cpu_bars [--rounds N] [--threads N] [--clock wall|cpu]");
    }
  }
  if (options.rounds < 1 || options.threads < 1) {
    throw std::invalid_argument("--rounds and --threads are at least 1");
  }
  return options;
}

double read_clock(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Something that is timed once a round.
struct Series {
  std::string name;
  std::function<void()> run;
  std::vector<double> seconds{};

  void time_once(const Options& options, int num_threads) {
    const clockid_t clock = options.use_cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    const double begin = read_clock(clock);
    run();
    const double elapsed = read_clock(clock) - begin;
    seconds.push_back(options.use_cpu_clock ? elapsed / num_threads : elapsed);
  }
  double median() const {
    std::vector<double> sorted = seconds;
    std::ranges::sort(sorted);
    const std::size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  double smallest() const { return *std::ranges::min_element(seconds); }
};

/// Median times of a run, in seconds, on all threads.
struct Measured {
  double dense = 0;  ///< the fastest library, both products of kBaseTokens
  double copy_bytes_per_second = 0;
  double base = 0;
  double many = 0;
  double few = 0;
  double few_weight_bytes = 0;
  double all_weight_bytes = 0;
  double rank_speedup = 0;  ///< best pair
};

void print_series(const Series& series, double work, const char* unit) {
  std::printf("  %-34s %9.2f %9.2f %9.1f %s\n", series.name.c_str(), 1e3 * series.median(),
              1e3 * series.smallest(), 1e-9 * work / series.median(), unit);
}

/// Both products of the experts as two dense ones.
Series dense_series(const DenseLibrary& library, const LayerShape& layer, int num_threads) {
  const std::int64_t rows = kBaseTokens * layer.top_k;
  const std::shared_ptr<DenseProduct> w13 =
      library.make({rows, 2 * layer.intermediate_dim, layer.hidden_dim}, num_threads);
  const std::shared_ptr<DenseProduct> w2 =
      library.make({rows, layer.hidden_dim, layer.intermediate_dim}, num_threads);
  return {"dense " + library.name, [=] {
            on_threads(num_threads, [&](int part) {
              w13->run(part);
              w2->run(part);
            });
          }};
}

void measure_ceilings_and_forward(const Options& options, const LayerWeights& weights,
                                  Measured& measured) {
  const LayerShape& layer = weights.shape();
  MemoryCopy copy(kCopyBytes, options.threads);
  std::vector<Series> all{{"memcpy", [&] { copy.run(); }}};
  for (const DenseLibrary& library : dense_libraries()) {
    all.push_back(dense_series(library, layer, options.threads));
  }
  const std::size_t num_ceilings = all.size();
  ForwardProblem base(weights, kBaseTokens, 1, options.threads);
  ForwardProblem many(weights, kManyTokens, 1, options.threads);
  ForwardProblem few(weights, kFewTokens, 1, options.threads);
  all.push_back({"forward T=1024", [&] { base.run(); }});
  all.push_back({"forward T=4096", [&] { many.run(); }});
  all.push_back({"forward T=64", [&] { few.run(); }});

  for (Series& series : all) series.run();
  for (int round = 0; round < options.rounds; ++round) {
    for (Series& series : all) series.time_once(options, options.threads);
  }

  std::printf("  %-34s %9s %9s\n", "", "median ms", "min ms");
  print_series(all[0], static_cast<double>(copy.bytes()), "GB/s copied");
  measured.copy_bytes_per_second = static_cast<double>(copy.bytes()) / all[0].median();
  measured.dense = all[1].median();
  for (std::size_t i = 1; i < num_ceilings; ++i) {
    print_series(all[i], layer.flops(kBaseTokens), "GFLOP/s");
    measured.dense = std::min(measured.dense, all[i].median());
  }
  const std::int64_t tokens[] = {kBaseTokens, kManyTokens, kFewTokens};
  double* medians[] = {&measured.base, &measured.many, &measured.few};
  for (std::size_t i = 0; i < 3; ++i) {
    print_series(all[num_ceilings + i], layer.flops(tokens[i]), "GFLOP/s");
    *medians[i] = all[num_ceilings + i].median();
  }
  measured.few_weight_bytes = static_cast<double>(few.touched_weight_bytes());
  measured.all_weight_bytes = static_cast<double>(layer.num_experts * layer.weights_per_expert() *
                                                  static_cast<std::int64_t>(sizeof(BF16)));
}

void measure_ranks(const Options& options, const LayerWeights& weights, Measured& measured) {
  ForwardProblem one(weights, kBaseTokens, 1, 1);
  ForwardProblem two(weights, kBaseTokens, 2, 1);
  Series alone{"forward T=1024, 1 rank, 1 thread", [&] { one.run(); }};
  Series both{"forward T=1024, 2 ranks, 1 thread", [&] { two.run(); }};
  alone.run();
  both.run();
  for (int pair = 0; pair < kPairs; ++pair) {
    alone.time_once(options, 1);
    both.time_once(options, 2);
    measured.rank_speedup =
        std::max(measured.rank_speedup, alone.seconds.back() / both.seconds.back());
  }
  print_series(alone, weights.shape().flops(kBaseTokens), "GFLOP/s");
  print_series(both, weights.shape().flops(kBaseTokens), "GFLOP/s");
}

void print_bar(const char* name, double figure, double limit, const char* unit, bool at_least) {
  const bool holds = at_least ? figure >= limit : figure <= limit;
  std::printf("  %-34s %9.2f %9.2f %-3s %s\n", name, figure, limit, unit, holds ? "pass" : "FAIL");
}

void print_bars(const Measured& m) {
  const double rate = m.copy_bytes_per_second;
  const double base_limit = 1.25 * std::max(m.dense, m.all_weight_bytes / rate);
  const double few_limit =
      2 * (m.few_weight_bytes / rate + m.dense * double(kFewTokens) / double(kBaseTokens));
  std::printf("\n  %-34s %9s %9s\n", "bar", "figure", "limit");
  print_bar("T=1024 <= 1.25 max(dense, weights)", 1e3 * m.base, 1e3 * base_limit, "ms", false);
  print_bar("T=4096 / T=1024", m.many / m.base, 4.3, "", false);
  print_bar("T=64 <= 2 (weights + dense)", 1e3 * m.few, 1e3 * few_limit, "ms", false);
  print_bar("1 rank / 2 ranks, best of 5 pairs", m.rank_speedup, 1.6, "", true);
}

/// Of the last minute. Well above the threads of the run it means that others took part.
double load_average() {
  double load = 0;
  getloadavg(&load, 1);
  return load;
}

void run(const Options& options) {
  const LayerShape layer;
  std::printf("%s; %d threads, %d rounds, %s, load average %.2f\n", cpu::describe_matmul().c_str(),
              options.threads, options.rounds,
              options.use_cpu_clock ? "CPU time per thread" : "wall time", load_average());
  std::printf("D=%lld F=%lld E=%lld K=%lld, uniform random routing\n\n",
              static_cast<long long>(layer.hidden_dim),
              static_cast<long long>(layer.intermediate_dim),
              static_cast<long long>(layer.num_experts), static_cast<long long>(layer.top_k));
  const LayerWeights weights(layer);
  Measured measured;
  measure_ceilings_and_forward(options, weights, measured);
  measure_ranks(options, weights, measured);
  print_bars(measured);
  std::printf("\nload average at the end %.2f\n", load_average());
}

}  // namespace
}  // namespace distmoe::bench

int main(int argc, char** argv) {
  try {
    distmoe::bench::run(distmoe::bench::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cpu_bars: %s\n", error.what());
    return 2;
  }
}
