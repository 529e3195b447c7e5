// SPDX-License-Identifier: Apache-2.0
//
// Checks the grouped GEMM on odd problems, then times both products on the shapes of known models
// beside cuBLAS on balanced batches of the same FLOPs, in interleaved rounds. Exit code 3: a check
// failed.
//   grouped_gemm_bench [check] [sweep] [models]      (all three by default)
#include <algorithm>
#include <cstring>
#include <random>

#include "bench/cuda/cublas.hpp"
#include "gemm_check.hpp"
#include "gemm_problem.hpp"

namespace distmoe::cuda::bench {
namespace {

bool run_checks(bool pulled_only) {
  const std::vector<int> odd = {0, 1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 321, 0, 40};
  const std::vector<ProblemShape> shapes = {
      {"one row", 64, 32, 3, {1}},
      {"one tile", 256, 128, 64, {200}},
      {"odd rows", 1536, 704, 300, odd},
      {"narrow", 192, 192, 300, odd},
      {"K tail", 200, 72, 300, odd},
      {"interleaved", 1536, 192, 300, odd, true},
      {"clamped, biases", 2880, 704, 300, odd, true, true, true},
      {"biases", 192, 1536, 300, odd, false, false, true},
      {"every width",
       256,
       256,
       300,
       {2, 20, 50, 90, 120, 140, 150, 170, 180, 200, 215, 230, 250, 260, 280, 295, 310, 320}},
      {"many rows", 512, 512, 3000, {5000, 3, 1000}},
      {"pulled rows", 1536, 704, 300, odd, false, false, false, true},
  };
  bool ok = true;
  for (const ProblemShape& shape : shapes) {
    if (pulled_only && !shape.has_remote_rows) continue;
    Problem problem(shape);
    ok = check(problem, 4000) && ok;
    if (problem.frame.values()[0].failed != 0) std::printf("  FAIL frame.failed\n"), ok = false;
  }
  std::printf("checks: %s\n", ok ? "all ok" : "FAILED");
  return ok;
}

double median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Times steps of one round with events, medians over rounds.
struct Timer {
  explicit Timer(int steps) : events(steps + 1), samples(steps) {
    for (cudaEvent_t& event : events) DISTMOE_BENCH_CUDA(cudaEventCreate(&event));
  }
  void mark(int step) { DISTMOE_BENCH_CUDA(cudaEventRecord(events[step])); }
  void collect() {
    DISTMOE_BENCH_CUDA(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      float ms = 0;
      DISTMOE_BENCH_CUDA(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
      samples[i].push_back(ms);
    }
  }
  std::vector<cudaEvent_t> events;
  std::vector<std::vector<float>> samples;
};

void time_problem(const ProblemShape& shape, const tools::Cublas& cublas, int rounds) {
  Problem problem(shape);
  const std::int64_t d = shape.hidden_dim, f = shape.intermediate_dim;
  const int balanced = shape.num_rows() / shape.num_experts();
  const auto rows = static_cast<std::size_t>(balanced) * shape.num_experts();
  DeviceArray<__nv_bfloat16> tokens(rows * d), h1(rows * 2 * f), h2(rows * f), out(rows * d);
  // Random operands: power, and with it the clock, depends on the data.
  const auto fill = [&](DeviceArray<__nv_bfloat16>& to, const DeviceArray<__nv_bfloat16>& from) {
    for (std::size_t at = 0; at < to.size(); at += from.size()) {
      DISTMOE_BENCH_CUDA(cudaMemcpy(to.get() + at, from.get(),
                                    std::min(from.size(), to.size() - at) * 2,
                                    cudaMemcpyDeviceToDevice));
    }
  };
  fill(tokens, problem.w13);
  fill(h2, problem.w13);
  Timer timer(4);
  for (int round = 0; round < rounds + 2; ++round) {
    problem.reset_counters(nullptr);
    timer.mark(0);
    problem.run_w13(nullptr);
    timer.mark(1);
    problem.run_w2(nullptr);
    timer.mark(2);
    if (cublas.problem().empty()) {
      cublas.run({static_cast<int>(2 * f), balanced, static_cast<int>(d), shape.num_experts()},
                 problem.w13.get(), tokens.get(), h1.get(), nullptr);
    }
    timer.mark(3);
    if (cublas.problem().empty()) {
      cublas.run({static_cast<int>(d), balanced, static_cast<int>(f), shape.num_experts()},
                 problem.w2.get(), h2.get(), out.get(), nullptr);
    }
    timer.mark(4);
    timer.collect();
    if (round < 2) {
      for (auto& samples : timer.samples) samples.clear();
    }
  }
  const double flops_w13 = 4.0 * shape.num_rows() * d * f, flops_w2 = flops_w13 / 2;
  double ms[4];
  for (int i = 0; i < 4; ++i) ms[i] = median(timer.samples[i]);
  std::printf(
      "%-22s %8d %5d | %6.0f %6.0f %6.0f | %6.0f %6.0f %6.0f | %5.3f %5.3f %5.3f | %7.3f %7.3f\n",
      shape.name.c_str(), shape.num_rows(), token_tiling(balanced).rows_per_tile,
      flops_w13 / ms[0] * 1e-9, flops_w2 / ms[1] * 1e-9,
      (flops_w13 + flops_w2) / (ms[0] + ms[1]) * 1e-9, flops_w13 / ms[2] * 1e-9,
      flops_w2 / ms[3] * 1e-9, (flops_w13 + flops_w2) / (ms[2] + ms[3]) * 1e-9, ms[2] / ms[0],
      ms[3] / ms[1], (ms[2] + ms[3]) / (ms[0] + ms[1]), ms[0] + ms[1], ms[2] + ms[3]);
}

void print_head() {
  std::printf("%-22s %8s %5s | %6s %6s %6s | %6s %6s %6s | %5s %5s %5s | %7s %7s\n", "TFLOP/s",
              "rows", "n", "w13", "w2", "pair", "cu13", "cu2", "cupair", "x13", "x2", "xpair", "ms",
              "cu ms");
}

/// Uniform routing of distinct experts.
std::vector<int> random_rows(int num_tokens, int num_experts, int top_k) {
  std::mt19937 random(3);
  std::vector<int> rows(num_experts, 0);
  std::vector<int> order(num_experts);
  for (int e = 0; e < num_experts; ++e) order[e] = e;
  for (int t = 0; t < num_tokens; ++t) {
    for (int k = 0; k < top_k; ++k) {
      std::swap(order[k], order[k + random() % static_cast<unsigned>(num_experts - k)]);
      ++rows[order[k]];
    }
  }
  return rows;
}

void run_sweep(const tools::Cublas& cublas) {
  print_head();
  for (int n : {8, 32, 64, 80, 96, 112, 120, 128, 136, 144, 152}) {
    time_problem({"sweep D4096 F1536", 4096, 1536, 8192, std::vector<int>(66, 2 * n)}, cublas, 7);
  }
}

void run_models(const tools::Cublas& cublas) {
  struct Model {
    const char* name;
    int d, f, e, k;
  };
  constexpr int kTokens = 8192;
  print_head();
  for (const Model& model :
       {Model{"Mixtral-8x7B", 4096, 14336, 8, 2}, Model{"DeepSeek-V3 shard", 7168, 2048, 32, 8},
        Model{"Qwen3-235B-A22B", 4096, 1536, 128, 8}, Model{"gpt-oss-120b", 2880, 2880, 128, 4},
        Model{"Qwen3-30B-A3B", 2048, 768, 128, 8}, Model{"OLMoE-1B-7B", 2048, 1024, 64, 8}}) {
    time_problem({model.name, model.d, model.f, kTokens, random_rows(kTokens, model.e, model.k)},
                 cublas, 15);
  }
}

int run(int argc, char** argv) {
  const auto wants = [&](const char* what) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], what) == 0) return true;
    }
    return argc == 1;
  };
  DISTMOE_BENCH_CUDA(prepare_grouped_gemm());
  if (wants("pulled") && argc > 1 && !run_checks(true)) return 3;
  if (wants("check") && !run_checks(false)) return 3;
  const tools::Cublas cublas;
  if (!cublas.problem().empty()) std::printf("no cuBLAS: %s\n", cublas.problem().c_str());
  if (wants("models")) run_models(cublas);
  if (wants("sweep")) run_sweep(cublas);
  return 0;
}

}  // namespace
}  // namespace distmoe::cuda::bench

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  return distmoe::cuda::bench::run(argc, argv);
}
