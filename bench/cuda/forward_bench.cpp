// SPDX-License-Identifier: Apache-2.0
//
// The whole BF16 forward on CUDA: median time of a call, ranks as threads with a device each.
// Random data, uniform routing of distinct experts. One JSON object a line.
//   cuda_forward_bench RANKS TOKENS...
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "distmoe/distmoe.hpp"
#include "formats/bf16.hpp"

namespace distmoe {
namespace {

struct Shape {
  const char* name;
  std::int64_t d, f, experts_per_rank_1, k;
  bool experts_scale;  ///< the number of experts is per rank
};

constexpr Shape kShapes[] = {{"mixtral-8x7b", 4096, 14336, 8, 2, false},
                             {"deepseek-v3-shard32", 7168, 2048, 32, 8, true},
                             {"qwen3-235b-a22b", 4096, 1536, 128, 8, false},
                             {"gpt-oss-120b", 2880, 2880, 128, 4, false},
                             {"qwen3-30b-a3b", 2048, 768, 128, 8, false},
                             {"olmoe-1b-7b", 2048, 1024, 64, 8, false}};

/// BF16 noise of a given scale: 16 MiB of it, repeated.
void fill(cuda::DeviceBuffer& buffer, double scale, unsigned seed) {
  std::vector<BF16> block(std::size_t{1} << 23);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  for (BF16& value : block) value = to_bf16(normal(random));
  for (std::size_t at = 0; at < buffer.size(); at += block.size() * 2) {
    const std::size_t bytes = std::min(buffer.size() - at, block.size() * 2);
    DISTMOE_CUDA_CHECK(cudaMemcpy(static_cast<std::byte*>(buffer.data()) + at, block.data(), bytes,
                                  cudaMemcpyHostToDevice));
  }
}

std::vector<std::int32_t> random_ids(std::int64_t tokens, std::int64_t experts, std::int64_t k,
                                     unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
  for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int32_t>(e);
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(k); ++i) {
      std::swap(order[i], order[i + random() % (order.size() - i)]);
      ids.push_back(order[i]);
    }
  }
  return ids;
}

double run_rank(const Shape& shape, std::int64_t tokens,
                const std::shared_ptr<Communicator>& group) {
  const int rank = group->rank();
  const std::int64_t experts = shape.experts_per_rank_1 * (shape.experts_scale ? group->size() : 1);
  cudaSetDevice(rank);
  Config config;
  config.max_tokens = tokens;
  config.hidden_dim = shape.d;
  config.intermediate_dim = shape.f;
  config.top_k = shape.k;
  config.num_experts = experts;
  config.max_moe_layers_per_activation_slot = 1;
  config.inference = true;
  config.device_scratch_capacity_factor = 1.5;
  config.timeout = std::chrono::seconds(10);
  Context context = Context::create(config, group, {.backend = BackendKind::kCuda, .device = rank});
  const std::int64_t local = context.num_local_experts();
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count) * 2; };
  const Device device{DeviceType::kCuda, rank};
  cuda::DeviceBuffer x(bytes(tokens * shape.d), rank), y(bytes(tokens * shape.d), rank);
  cuda::DeviceBuffer w13(bytes(local * 2 * shape.f * shape.d), rank);
  cuda::DeviceBuffer w2(bytes(local * shape.f * shape.d), rank);
  fill(x, 1.0, 1);
  fill(w13, 1.0 / std::sqrt(shape.d), 2);
  fill(w2, 1.0 / std::sqrt(shape.f), 3);
  const auto host_ids = random_ids(tokens, experts, shape.k, 7u + static_cast<unsigned>(rank));
  std::vector<float> host_scores(host_ids.size(), 1.0f / static_cast<float>(shape.k));
  cuda::DeviceBuffer ids(host_ids.size() * 4, rank), scores(host_ids.size() * 4, rank);
  ids.upload(host_ids.data(), ids.size());
  scores.upload(host_scores.data(), scores.size());
  const RoutedInput input{TensorView(x.data(), DType::kBF16, {tokens, shape.d}, device),
                          TensorView(ids.data(), DType::kI32, {tokens, shape.k}, device),
                          TensorView(scores.data(), DType::kF32, {tokens, shape.k}, device)};
  const ExpertWeights weights{
      TensorView(w13.data(), DType::kBF16, {local, 2 * shape.f, shape.d}, device),
      TensorView(w2.data(), DType::kBF16, {local, shape.d, shape.f}, device),
      {},
      {}};
  const TensorView out(y.data(), DType::kBF16, {tokens, shape.d}, device);
  cudaStream_t stream = nullptr;
  DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  constexpr int kWarmUp = 3, kRounds = 21;
  std::vector<cudaEvent_t> events(2 * kRounds);
  for (cudaEvent_t& event : events) cudaEventCreate(&event);
  for (int i = -kWarmUp; i < kRounds; ++i) {
    if (i >= 0) cudaEventRecord(events[2 * static_cast<std::size_t>(i)], stream);
    routed_experts(context, input, weights, out, {.stream = stream});
    if (i >= 0) cudaEventRecord(events[2 * static_cast<std::size_t>(i) + 1], stream);
  }
  context.check();
  std::vector<float> ms(kRounds);
  for (std::size_t i = 0; i < kRounds; ++i) {
    cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]);
  }
  std::ranges::sort(ms);
  for (cudaEvent_t& event : events) cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  group->barrier(std::chrono::seconds(60));
  return ms[kRounds / 2];
}

int run(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 1;
  for (const Shape& shape : kShapes) {
    for (int i = 2; i < argc; ++i) {
      const std::int64_t tokens = std::atoll(argv[i]);
      std::vector<double> ms(static_cast<std::size_t>(ranks));
      run_thread_group(ranks, [&](const std::shared_ptr<Communicator>& group) {
        ms[static_cast<std::size_t>(group->rank())] = run_rank(shape, tokens, group);
      });
      const double slowest = *std::ranges::max_element(ms);
      const double flops = 6.0 * static_cast<double>(tokens * shape.k * shape.d * shape.f);
      std::printf(
          "{\"distmoe\": \"%s\", \"ranks\": %d, \"tokens\": %lld, \"median_us\": %.1f, \"tflops\": "
          "%.1f}\n",
          shape.name, ranks, static_cast<long long>(tokens), slowest * 1e3, flops / slowest * 1e-9);
    }
  }
  return 0;
}

}  // namespace
}  // namespace distmoe

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  return distmoe::run(argc, argv);
}
