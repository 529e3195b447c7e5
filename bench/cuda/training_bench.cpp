// SPDX-License-Identifier: Apache-2.0
//
// Times a saving forward and its backward, whole and step by step, on the shapes of known models:
// random routing, random data. Medians over rounds, of the first rank;
// ranks are threads that take the GPUs in turn.
//   bench_cuda_training [tokens] [rounds] [bf16|f32|bf16+|f32+] [ranks] [full|lean]
//       [device factor] [shape]
//   8192 9 bf16 1 full; with a + weights' gradients are added to; with a device factor other than 0
//   all other rows have scratch on the host; the shapes whose name has `shape` in it
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/device.hpp"
#include "distmoe/distmoe.hpp"
#include "runtime/backward.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe::cuda::bench {
namespace {

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(status));
  std::exit(1);
}

struct Model {
  const char* name;
  std::int64_t hidden_dim;
  std::int64_t intermediate_dim;
  std::int64_t num_experts;
  std::int64_t top_k;
  bool is_per_rank = false;  ///< num_experts is a rank's
};

constexpr Model kModels[] = {
    {"Mixtral-8x7B", 4096, 14336, 8, 2},     {"DeepSeek-V3, 32 experts", 7168, 2048, 32, 8, true},
    {"Qwen3-235B-A22B", 4096, 1536, 128, 8}, {"gpt-oss-120b", 2880, 2880, 128, 4},
    {"Qwen3-30B-A3B", 2048, 768, 128, 8},    {"OLMoE-1B-7B", 2048, 1024, 64, 8}};

/// A tensor on the device; floating-point ones hold random values of about `scale`.
class Tensor {
 public:
  Tensor(int device, DType dtype, std::initializer_list<std::int64_t> shape, float scale)
      : elements_(
            std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>())),
        buffer_(static_cast<std::size_t>(elements_) * size_of(dtype), device),
        view_(buffer_.data(), dtype, shape, {DeviceType::kCuda, device}) {
    if (scale == 0.0F) return;
    std::mt19937 random(static_cast<unsigned>(elements_));
    std::normal_distribution<float> normal(0.0F, scale);
    std::vector<BF16> block(1 << 20);
    for (BF16& value : block) value = to_bf16(normal(random));
    for (std::size_t at = 0; at < buffer_.size(); at += block.size() * 2) {
      const std::size_t bytes = std::min(block.size() * 2, buffer_.size() - at);
      check(cudaMemcpy(static_cast<std::byte*>(buffer_.data()) + at, block.data(), bytes,
                       cudaMemcpyHostToDevice));
    }
  }
  const TensorView& view() const { return view_; }
  const DeviceBuffer& buffer() const { return buffer_; }

 private:
  std::int64_t elements_;
  DeviceBuffer buffer_;
  TensorView view_;
};

/// Distinct experts for every token.
std::vector<std::int32_t> random_ids(const Model& model, std::int64_t num_experts,
                                     std::int64_t tokens, int rank) {
  std::mt19937 random(static_cast<unsigned>(7 + rank));
  std::vector<std::int32_t> experts(static_cast<std::size_t>(num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::vector<std::int32_t> ids;
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(model.top_k); ++k) {
      std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
      ids.push_back(experts[k]);
    }
  }
  return ids;
}

/// Events of one round and medians of what lies between them.
class Timer {
 public:
  void mark(const char* what, cudaStream_t stream) {
    if (next_ == steps_.size()) {
      steps_.push_back({what, {}, {}});
      check(cudaEventCreate(&steps_.back().event));
    }
    check(cudaEventRecord(steps_[next_++].event, stream));
  }
  /// A round that is over; `counts` is false while the device warms up.
  void collect(bool counts) {
    check(cudaDeviceSynchronize());
    for (std::size_t i = 0; counts && i + 1 < steps_.size(); ++i) {
      float ms = 0;
      check(cudaEventElapsedTime(&ms, steps_[i].event, steps_[i + 1].event));
      steps_[i].ms.push_back(ms);
    }
    next_ = 0;
  }
  double median(std::size_t step) {
    std::vector<float>& ms = steps_[step].ms;
    std::ranges::sort(ms);
    return ms[ms.size() / 2];
  }
  std::size_t num_steps() const { return steps_.size() - 1; }
  const char* name(std::size_t step) const { return steps_[step].name; }

 private:
  struct Step {
    const char* name;
    cudaEvent_t event;
    std::vector<float> ms;
  };
  std::vector<Step> steps_;
  std::size_t next_ = 0;
};

/// What is timed from a step of the backward on, up to the next name; null where a step has no time
/// of its own.
const char* timed_from(BackwardStep step) {
  switch (step) {
    case BackwardStep::kPublish: return "publish";
    case BackwardStep::kRestoreActivations: return "restore";
    case BackwardStep::kDispatchGradH3: return "grad_h3";
    case BackwardStep::kW2Dgrad: return "w2_dgrad";
    case BackwardStep::kW2Wgrad: return "w2_wgrad";
    case BackwardStep::kW13Wgrad: return "w13_wgrad";
    case BackwardStep::kW13DgradScatter: return "w13_dgrad";
    case BackwardStep::kReduceGradients: return "reduce";
    case BackwardStep::kEnd: return "end";
    case BackwardStep::kCarve:
    case BackwardStep::kSwigluBackward: break;
  }
  return nullptr;
}

struct Options {
  std::int64_t tokens = 8192;
  int rounds = 9;
  DType wgrad = DType::kBF16;
  bool accumulates = false;
  int ranks = 1;
  ActivationPolicy policy = ActivationPolicy::kFull;
  /// Given: scratch of the device has room for so much of the balanced rows, the host for the rest.
  std::optional<double> device_factor;
};

void time_model(const Model& model, const Options& options_of_run,
                const std::shared_ptr<Communicator>& communicator) {
  const auto [name, d, f, experts_of_model, top_k, is_per_rank] = model;
  const auto [tokens, rounds, wgrad, accumulates, ranks, policy, device_factor] = options_of_run;
  const int rank = communicator->rank();
  const int device = rank % device_count();
  check(cudaSetDevice(device));
  const std::int64_t all_experts = is_per_rank ? experts_of_model * ranks : experts_of_model;
  const std::int64_t experts = all_experts / ranks;
  Config config{.max_tokens = tokens,
                .hidden_dim = d,
                .intermediate_dim = f,
                .top_k = top_k,
                .num_experts = all_experts,
                .max_moe_layers_per_activation_slot = 1,
                .activation_slot_capacity_factor = ranks > 1 ? 1.05 : 1.0,
                .activation_policy = policy,
                .timeout = std::chrono::seconds(20)};
  if (device_factor) {
    config.device_scratch_capacity_factor = *device_factor;
    config.host_scratch = HostScratch{.total_scratch_capacity_factor = 2.0};
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  {
    Context context =
        Context::create(config, ranks > 1 ? communicator : nullptr,
                        {.backend = BackendKind::kCuda, .num_threads = 1, .device = device});
    const Tensor x(device, DType::kBF16, {tokens, d}, 1.0F);
    const Tensor dy(device, DType::kBF16, {tokens, d}, 1.0F);
    const Tensor w13(device, DType::kBF16, {experts, 2 * f, d}, 0.02F);
    const Tensor w2(device, DType::kBF16, {experts, d, f}, 0.02F);
    const Tensor y(device, DType::kBF16, {tokens, d}, 0.0F);
    const Tensor grad_x(device, DType::kBF16, {tokens, d}, 0.0F);
    const Tensor ids(device, DType::kI32, {tokens, top_k}, 0.0F);
    const Tensor scores(device, DType::kF32, {tokens, top_k}, 0.0F);
    const Tensor grad_scores(device, DType::kF32, {tokens, top_k}, 0.0F);
    const float initial = accumulates ? 0.02F : 0.0F;
    const Tensor grad_w13(device, wgrad, {experts, 2 * f, d}, initial);
    const Tensor grad_w2(device, wgrad, {experts, d, f}, initial);
    const std::vector<std::int32_t> host_ids = random_ids(model, all_experts, tokens, rank);
    ids.buffer().upload(host_ids.data(), host_ids.size() * 4);
    const std::vector<float> host_scores(host_ids.size(), 1.0F / static_cast<float>(top_k));
    scores.buffer().upload(host_scores.data(), host_scores.size() * 4);
    const RoutedInput input{x.view(), ids.view(), scores.view()};
    const ExpertWeights weights{w13.view(), w2.view()};
    const RoutedGradients gradients{.grad_x_TD = grad_x.view(),
                                    .grad_scores_TK = grad_scores.view(),
                                    .grad_w13_L2FD = {grad_w13.view(), accumulates},
                                    .grad_w2_LDF = {grad_w2.view(), accumulates}};
    CallOptions options;
    options.stream = stream;
    Timer timer;
    const BackwardStepObserver marks = [&](BackwardStep next) {
      if (const char* what = timed_from(next)) timer.mark(what, stream);
    };
    bool is_recomputed = false;
    for (int round = 0; round < rounds + 2; ++round) {
      timer.mark("forward", stream);
      const SavedForward saved = saving_routed_experts(context, input, weights, y.view(), options);
      run_backward(context.impl(), {saved, dy.view(), weights, gradients, options, &marks});
      timer.collect(round >= 2);
      is_recomputed = context.last_call().is_recomputed;
    }
    context.check();
    communicator->barrier(std::chrono::seconds(20));
    if (rank != 0) return;
    double total = 0;
    for (std::size_t step = 0; step < timer.num_steps(); ++step) total += timer.median(step);
    const double flops = 6.0 * static_cast<double>(tokens * top_k * d * f);
    const auto rate = [&](double parts, double ms) { return parts * flops / ms * 1e-9; };
    std::printf("%-24s %7.3f ms %4.0f TFLOP/s%s, slot %.3f GB |", name, total, rate(3, total),
                is_recomputed ? " (recomputed)" : "",
                static_cast<double>(context.memory_plan().slot_bytes) * 1e-9);
    for (std::size_t step = 0; step < timer.num_steps(); ++step) {
      const std::string what = timer.name(step);
      const double ms = timer.median(step);
      const bool is_whole = what == "forward";
      const bool is_w13 = what.starts_with("w13");
      const bool is_w2 = what.starts_with("w2");
      std::printf(" %s %.3f", what.c_str(), ms);
      if (is_whole || is_w13 || is_w2) {
        std::printf(" (%.0f)", rate(is_whole ? 1 : is_w13 ? 2.0 / 3 : 1.0 / 3, ms));
      }
    }
    std::printf("\n");
  }
}

int main_of(int argc, char** argv) {
  Options options;
  if (argc > 1) options.tokens = std::atoll(argv[1]);
  if (argc > 2) options.rounds = std::atoi(argv[2]);
  if (argc > 3) {
    const std::string wgrad = argv[3];
    if (wgrad.starts_with("f32")) options.wgrad = DType::kF32;
    options.accumulates = wgrad.ends_with('+');
  }
  if (argc > 4) options.ranks = std::atoi(argv[4]);
  if (argc > 5 && std::string(argv[5]) == "lean") options.policy = ActivationPolicy::kLean;
  if (argc > 6 && std::atof(argv[6]) > 0) options.device_factor = std::atof(argv[6]);
  const std::string shape = argc > 7 ? argv[7] : "";
  for (const Model& model : kModels) {
    if (std::string(model.name).find(shape) == std::string::npos) continue;
    run_thread_group(options.ranks, [&](const std::shared_ptr<Communicator>& communicator) {
      time_model(model, options, communicator);
    });
  }
  return 0;
}

}  // namespace
}  // namespace distmoe::cuda::bench

int main(int argc, char** argv) {
  try {
    return distmoe::cuda::bench::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
