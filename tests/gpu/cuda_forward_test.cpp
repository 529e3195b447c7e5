// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on CUDA rows stand in the CPU's order and hold the bits of their tokens; the same call
// gives the same bits run after run, and with kernel_choice = fixed for every number of ranks.
#include "gpu/gpu_ranks.hpp"

#include <mutex>
#include <optional>

#include "backend/cpu/routing.hpp"
#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "layout/context_buffers.hpp"
#include "layout/row_origin.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe::gpu {
namespace {

using conformance::DeviceCall;
using conformance::MoeProblem;
using conformance::MoeShape;
using conformance::outcome_of;
using conformance::RoutePattern;
using conformance::TokenCounts;

class CudaForward : public GpuTest {};

/// The CPU's routing of a problem, seen from one rank.
class CpuRouting {
 public:
  CpuRouting(const MoeProblem& problem, const TokenCounts& counts, int rank)
      : routing_(problem.shape.num_experts, problem.shape.top_k, rank,
                 static_cast<int>(counts.size()), buffers(problem, counts.size())) {
    ids_.assign(problem.ids.begin(), problem.ids.end());
    const std::int32_t* next = ids_.data();
    for (const std::int64_t tokens : counts) {
      rank_ids_.push_back({next, tokens});
      next += tokens * problem.shape.top_k;
    }
    routing_.count(rank_ids_);
    routing_.order(rank_ids_);
  }
  const cpu::Routing& get() const { return routing_; }

 private:
  cpu::RoutingBuffers buffers(const MoeProblem& problem, std::size_t ranks) {
    const auto routes = static_cast<std::size_t>(problem.num_routes());
    origin_.resize(routes);
    received_.resize(routes);
    row_of_route_.resize(routes);
    counts_.resize(static_cast<std::size_t>(problem.shape.num_experts) * ranks);
    begin_.resize(static_cast<std::size_t>(problem.shape.num_experts) + 1);
    return {origin_, received_, row_of_route_, counts_, begin_};
  }

  std::vector<RowOrigin> origin_;
  std::vector<std::int32_t> received_;
  std::vector<std::int64_t> row_of_route_, counts_, begin_;
  std::vector<std::int32_t> ids_;
  std::vector<cpu::RankIds> rank_ids_;
  cpu::Routing routing_;
};

/// What a context on a device keeps of its last call.
class DeviceRouting {
 public:
  explicit DeviceRouting(Context& context)
      : memory_(dynamic_cast<cuda::CudaBackend&>(*context.impl().backend()).memory()) {}

  template <typename Element>
  std::vector<Element> read(const char* name, std::int64_t count) const {
    return read_at<Element>(memory_.address(name), count);
  }
  template <typename Element>
  static std::vector<Element> read_at(std::uint64_t address, std::int64_t count) {
    std::vector<Element> out(static_cast<std::size_t>(count));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): rows are found through addresses
    DISTMOE_CUDA_CHECK(cudaMemcpy(out.data(), reinterpret_cast<const void*>(address),
                                  out.size() * sizeof(Element), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  const cuda::DeviceMemory& memory_;
};

/// The group's token of a row.
std::int64_t token_of(const RowOrigin& origin, const TokenCounts& counts) {
  std::int64_t first = 0;
  for (int rank = 0; rank < origin.source; ++rank) first += counts[static_cast<std::size_t>(rank)];
  return first + origin.token;
}

void expect_cpu_rows(const MoeProblem& problem, const TokenCounts& counts, Context& context) {
  const CpuRouting cpu(problem, counts, context.rank());
  const DeviceRouting device(context);
  const std::int64_t num_rows = cpu.get().num_rows();
  const auto frame = device.read<cuda::CallFrame>(buffer_name::kCallFrame, 1).front();
  ASSERT_EQ(frame.num_rows, num_rows);
  const auto origins = device.read<RowOrigin>(buffer_name::kRowOrigin, num_rows);
  const auto addresses = device.read<std::uint64_t>(buffer_name::kTokenRowAddress, num_rows);
  const auto begin =
      device.read<std::int32_t>(buffer_name::kExpertBegin, cpu.get().num_local_experts() + 1);
  for (std::size_t expert = 0; expert < begin.size(); ++expert) {
    EXPECT_EQ(begin[expert], cpu.get().expert_begin(static_cast<std::int64_t>(expert)));
  }
  const std::int64_t width = problem.shape.hidden_dim;
  for (std::size_t row = 0; row < origins.size(); ++row) {
    const RowOrigin& expected = cpu.get().row_origin()[row];
    ASSERT_EQ(origins[row].source, expected.source) << "row " << row;
    ASSERT_EQ(origins[row].token, expected.token) << "row " << row;
    ASSERT_EQ(origins[row].k, expected.k) << "row " << row;
    const auto bits = DeviceRouting::read_at<BF16>(addresses[row], width);
    const BF16* x = problem.x.data() + token_of(expected, counts) * width;
    ASSERT_EQ(conformance::first_difference({x, x + width}, bits, width), "") << "row " << row;
  }
}

TEST_F(CudaForward, RowsStandInTheCpusOrderAndHoldTheirTokens) {
  for (const MoeShape& shape :
       {MoeShape{150, 72, 32, 21, 5}, MoeShape{600, 24, 8, 3, 2}, MoeShape{5, 64, 32, 512, 10},
        MoeShape{64, 16, 8, 1, 1}, MoeShape{0, 16, 8, 7, 2}}) {
    const MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 2);
    for (const Devices& devices : all_devices()) {
      SCOPED_TRACE(name_of(devices) + ", T=" + std::to_string(shape.num_tokens));
      const TokenCounts counts =
          conformance::ragged_split(shape.num_tokens, static_cast<int>(devices.size()), 1);
      on_every_rank(problem, {.devices = devices, .counts = counts},
                    [&](Context& context, DeviceCall& call, Communicator&) {
                      routed_experts(context, call.input(), call.weights(), call.y.view());
                      context.check();
                      expect_cpu_rows(problem, counts, context);
                    });
    }
  }
}

/// What a program allocates after it made, used or closed a context lies where it lay before.
TEST_F(CudaForward, TheDeviceOfTheCallersThreadStaysItsOwn) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const conformance::MoeCase on_second = cuda_case({1});
  const Config config = conformance::config_of(problem, on_second, {}, 8);
  const conformance::RankCall host = conformance::pack_rank(problem, {}, {8}, 0);
  const auto current = [] {
    int device = -1;
    cudaGetDevice(&device);
    return device;
  };
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  {
    Context context = conformance::make_context(config, on_second, nullptr);
    EXPECT_EQ(current(), 0);
    conformance::call_experts(context, host);
    EXPECT_EQ(current(), 0);
    context.close();
    EXPECT_EQ(current(), 0);
  }
  EXPECT_EQ(conformance::first_violation(problem, host.y_rows()), "");
}

TEST_F(CudaForward, FortyRunsGiveTheSameBits) {
  const MoeProblem problem =
      conformance::make_problem({500, 256, 128, 16, 8}, RoutePattern::kMixed, 9);
  for (const Combine combine : {Combine::kPerRoute, Combine::kPerRank}) {
    for (const Devices& devices : all_devices()) {
      SCOPED_TRACE(name_of(devices));
      on_every_rank(
          problem,
          {.devices = devices,
           .counts = conformance::even_split(500, static_cast<int>(devices.size())),
           .adjust = [&](Config& config) { config.combine = combine; }},
          [&](Context& context, DeviceCall& call, Communicator&) {
            std::vector<BF16> first;
            for (int run = 0; run < 40; ++run) {
              DISTMOE_CUDA_CHECK(cudaMemset(call.y.buffer().data(), 0xFF, call.y.buffer().size()));
              routed_experts(context, call.input(), call.weights(), call.y.view());
              context.check();
              const std::vector<BF16> y = call.y_rows();
              if (run == 0) first = y;
              ASSERT_EQ(conformance::first_difference(first, y, 256), "") << run;
            }
          });
    }
  }
}

// kernel_choice = fixed promises it for P = 1, 2, 4; today's kernels keep it for every P with
// either choice and any number of SMs, because a tile's shape and place are in no sum.
TEST_F(CudaForward, EveryNumberOfRanksGivesTheSameBits) {
  for (const MoeShape& shape : {MoeShape{700, 384, 136, 9, 4}, MoeShape{64, 1536, 256, 6, 3}}) {
    const MoeProblem problem = conformance::make_problem(shape, RoutePattern::kMixed, 13);
    const std::vector<BF16> first = run_cuda(problem, {.counts = {shape.num_tokens}});
    for (const KernelChoice choice : {KernelChoice::kTuned, KernelChoice::kFixed}) {
      for (const std::optional<std::int64_t> num_sms : {std::optional<std::int64_t>(), {24}}) {
        for (const Devices& devices : all_devices()) {
          const auto ranks = static_cast<int>(devices.size());
          const std::vector<BF16> y =
              run_cuda(problem, {.devices = devices,
                                 .counts = conformance::ragged_split(shape.num_tokens, ranks, 3),
                                 .adjust = [&](Config& config) {
                                   config.kernel_choice = choice;
                                   config.num_sms = num_sms;
                                 }});
          EXPECT_EQ(conformance::first_difference(first, y, shape.hidden_dim), "")
              << name_of(devices) << ", " << num_sms.value_or(0) << " SMs, choice "
              << static_cast<int>(choice);
        }
      }
    }
  }
}

// Many tokens run other kernels than few, few other code than one.
TEST_F(CudaForward, FewTokensHaveTheBitsOfMany) {
  constexpr std::int64_t kWidth = 256;
  for (const std::int64_t top_k : {4, 8}) {
    const MoeProblem many =
        conformance::make_problem({300, kWidth, 136, 9, top_k}, RoutePattern::kMixed, 21);
    const std::vector<BF16> all = run_cuda(many, {.counts = {300}});
    for (const std::int64_t tokens : {1, 2, 7, 36}) {
      MoeProblem few = many;
      few.shape.num_tokens = tokens;
      const std::vector<BF16> y = run_cuda(few, {.counts = {tokens}});
      const std::vector<BF16> expected(all.begin(), all.begin() + tokens * kWidth);
      EXPECT_EQ(conformance::first_difference(expected, y, kWidth), "")
          << tokens << " tokens, K=" << top_k;
    }
  }
}

// A rank of one token gets as many rows as its peers send: of few one kernel makes the products, of
// many others do, whatever the rank's own tokens are. Which, the tiles that those drew tell.
TEST_F(CudaForward, PeersRowsDecideWhichKernelComputes) {
  const auto is_grouped = [](Context& context) {
    const DeviceRouting device(context);
    const auto frame = device.read<cuda::CallFrame>(buffer_name::kCallFrame, 1).front();
    return frame.next_tile[static_cast<int>(cuda::Product::kW13)] > 0 &&
           frame.next_tile[static_cast<int>(cuda::Product::kW2)] > 0;
  };
  const auto compare = [&](const MoeProblem& problem, const Devices& devices,
                           std::int64_t peers_tokens) {
    const std::vector<BF16> alone = run_cuda(problem, {.counts = {peers_tokens + 1}});
    EXPECT_EQ(conformance::first_violation(problem, alone), "");
    RowsOfRanks rows(2);
    on_every_rank(problem,
                  {.devices = devices,
                   .counts = {1, peers_tokens},
                   .adjust = [](Config& config) { config.max_tokens = 900; }},
                  [&](Context& context, DeviceCall& call, Communicator&) {
                    for (int repeat = 0; repeat < 3; ++repeat) {
                      routed_experts(context, call.input(), call.weights(), call.y.view());
                      context.check();
                    }
                    EXPECT_EQ(is_grouped(context), peers_tokens == 900);
                    rows.put(context.rank(), call.y_rows());
                  });
    EXPECT_EQ(conformance::first_difference(alone, rows.all(), 256), "");
  };
  std::vector<Devices> placements = {{0, 0}};
  if (cuda::device_count() > 1) placements.push_back({0, 1});
  for (const Devices& devices : placements) {
    for (const Activation activation : {Activation::kSwiGLU, Activation::kSwiGLUClamped}) {
      for (const std::int64_t peers_tokens : {20, 900}) {
        SCOPED_TRACE(name_of(devices) + ", " + std::to_string(peers_tokens) + " tokens of a peer");
        MoeProblem problem = conformance::make_problem({peers_tokens + 1, 256, 136, 8, 4},
                                                       RoutePattern::kDistinct, 31);
        problem.activation = activation;
        compare(problem, devices, peers_tokens);
      }
    }
  }
}

// Small and large calls take turns on one context: what one kernel leaves, the other finds.
TEST_F(CudaForward, CallsOfFewAndOfManyRowsTakeTurns) {
  const auto problem_of = [](std::int64_t tokens) {
    MoeProblem problem = conformance::make_problem({900, 256, 136, 8, 4}, RoutePattern::kMixed, 32);
    problem.shape.num_tokens = tokens;
    return problem;
  };
  const std::vector<BF16> all = run_cuda(problem_of(900), {.counts = {900}});
  std::vector<Devices> placements = {{0, 0}};
  if (cuda::device_count() > 1) placements.push_back({1, 0});
  for (const Devices& devices : placements) {
    on_every_rank(problem_of(900), {.devices = devices, .counts = {1, 899}},
                  [&](Context& context, DeviceCall&, Communicator&) {
                    for (const std::int64_t peers_tokens : {899, 3, 400, 899, 1, 2}) {
                      const conformance::RankCall host = conformance::pack_rank(
                          problem_of(1 + peers_tokens), {}, {1, peers_tokens}, context.rank());
                      DeviceCall call(host, devices[static_cast<std::size_t>(context.rank())]);
                      routed_experts(context, call.input(), call.weights(), call.y.view());
                      context.check();
                      const auto begin = all.begin() + (context.rank() == 0 ? 0 : 256);
                      const std::vector<BF16> expected(
                          begin, begin + (context.rank() == 0 ? 1 : peers_tokens) * 256);
                      EXPECT_EQ(conformance::first_difference(expected, call.y_rows(), 256), "")
                          << peers_tokens;
                    }
                  });
  }
}

// One launch or several of the head and of the end of a call; the ranks that have few tokens may
// choose otherwise than their peers.
TEST_F(CudaForward, FewTokensOfRanksHaveTheSameBitsHoweverTheyAreLaunched) {
  const auto compare = [](const Devices& devices, Combine combine, std::int64_t tokens) {
    const auto ranks = static_cast<int>(devices.size());
    const MoeProblem problem =
        conformance::make_problem({tokens, 256, 136, 9, 4}, RoutePattern::kMixed, 22);
    std::vector<BF16> first;
    for (const LaunchForm& form : launch_forms()) {
      const std::vector<BF16> y =
          run_cuda(problem, {.devices = devices,
                             .counts = conformance::ragged_split(tokens, ranks, 2),
                             .adjust = [&](Config& config) {
                               config.combine = combine;
                               form.apply(config);
                             }});
      if (first.empty()) first = y;
      EXPECT_EQ(conformance::first_difference(first, y, 256), "")
          << name_of(devices) << ", " << tokens << " tokens, " << form.name;
    }
    EXPECT_EQ(conformance::first_violation(problem, first), "");
  };
  for (const Devices& devices : all_devices()) {
    if (devices.size() == 1) continue;
    for (const std::int64_t tokens : {1, 3, 20, 130}) {
      compare(devices, Combine::kPerRoute, tokens);
      compare(devices, Combine::kPerRank, tokens);
    }
  }
}

// 256 tokens that name one expert in all of their 255 routes fill the counters of routing.
TEST_F(CudaForward, AsManyRoutesAsATokenMayHaveToOneExpert) {
  const MoeProblem problem =
      conformance::make_exact_problem({256, 8, 8, 300, 255}, RoutePattern::kOneExpert, 14);
  for (const Devices& devices : {Devices{0}, Devices{0, 0}}) {
    const auto ranks = static_cast<int>(devices.size());
    const std::vector<BF16> y =
        run_cuda(problem, {.devices = devices, .counts = conformance::even_split(256, ranks)});
    EXPECT_EQ(conformance::first_difference(conformance::plain_of(problem), y, 8), "")
        << name_of(devices);
  }
}

/// `rows` again and again, `count` times in all.
template <typename Element>
std::vector<Element> repeated(const std::vector<Element>& rows, std::int64_t width,
                              std::int64_t count) {
  std::vector<Element> all;
  all.reserve(static_cast<std::size_t>(count * width));
  const auto length = static_cast<std::int64_t>(rows.size()) / width;
  for (std::int64_t row = 0; row < count; ++row) {
    const auto begin = rows.begin() + row % length * width;
    all.insert(all.end(), begin, begin + width);
  }
  return all;
}

// T * K * D beyond 2^31, and rows of windows and scratch beyond 2^32 bytes: 64 tokens many times
// over, each of which must have the bits that it has everywhere else.
TEST_F(CudaForward, RowsBeyond32BitsOfElementsAndBytes) {
  constexpr std::int64_t kWidth = 8192;
  constexpr std::int64_t kDistinctTokens = 64;
  constexpr std::int64_t kTokens = 40000;  // of a rank
  static_assert(kTokens * 8 * kWidth > std::int64_t{1} << 31);
  static_assert(kTokens % kDistinctTokens == 0);
  const MoeProblem few =
      conformance::make_problem({kDistinctTokens, kWidth, 8, 16, 8}, RoutePattern::kDistinct, 41);
  MoeProblem many = few;
  many.shape.num_tokens = 2 * kTokens;
  many.x = repeated(few.x, kWidth, 2 * kTokens);
  many.ids = repeated(few.ids, 8, 2 * kTokens);
  many.scores = repeated(few.scores, 8, 2 * kTokens);
  std::vector<Devices> placements = {{0, 0}};
  if (cuda::device_count() > 1) placements.push_back({0, 1});
  for (const Devices& devices : placements) {
    SCOPED_TRACE(name_of(devices));
    const Config config = conformance::config_of(many, cuda_case(devices), {}, kTokens);
    const MemoryPlan plan = plan_memory(config, 2, {.backend = BackendKind::kCuda});
    const std::int64_t x_and_y = 2 * kTokens * kWidth * 2;
    const std::int64_t needed_bytes =
        (devices[0] == devices[1] ? 2 : 1) * (plan.allocated_bytes + x_and_y) +
        (std::int64_t{1} << 30);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    if (static_cast<std::int64_t>(free_bytes) < needed_bytes) {
      GTEST_SKIP() << "needs " << needed_bytes << " bytes of a GPU, " << free_bytes << " are free";
    }
    const std::vector<BF16> y = run_cuda(many, {.devices = devices, .counts = {kTokens, kTokens}});
    const std::vector<BF16> last(y.end() - kDistinctTokens * kWidth, y.end());
    EXPECT_EQ(conformance::first_violation(few, last), "");
    for (std::int64_t token = 0; token < 2 * kTokens; ++token) {
      const auto row = y.begin() + token * kWidth;
      const auto same = last.begin() + token % kDistinctTokens * kWidth;
      ASSERT_TRUE(
          std::equal(row, row + kWidth, same, [](BF16 a, BF16 b) { return a.bits == b.bits; }))
          << "token " << token;
    }
  }
}

/// Weights that all experts share (a stride of 0 between experts), and strides that no tensor map
/// takes, which the door names.
TEST_F(CudaForward, StridesOfWeightsAreHonouredOrRefused) {
  MoeProblem problem = conformance::make_problem({40, 64, 32, 3, 2}, RoutePattern::kDistinct, 15);
  const auto matrix = static_cast<std::ptrdiff_t>(32 * 64);
  for (std::vector<BF16>* weights : {&problem.gate, &problem.up, &problem.down}) {
    for (std::ptrdiff_t expert = 1; expert < 3; ++expert) {
      std::copy_n(weights->begin(), matrix, weights->begin() + expert * matrix);
    }
  }
  on_every_rank(problem, {.counts = {40}}, [&](Context& context, DeviceCall& call, Communicator&) {
    ExpertWeights shared = call.weights();
    shared.w13_L2FD.strides[0] = 0;
    shared.w2_LDF.strides[0] = 0;
    routed_experts(context, call.input(), shared, call.y.view());
    context.check();
    EXPECT_EQ(conformance::first_violation(problem, call.y_rows()), "");
    ExpertWeights backwards = call.weights();
    backwards.w2_LDF.strides[0] *= -1;
    conformance::expect_error(
        outcome_of([&] { routed_experts(context, call.input(), backwards, call.y.view()); }),
        ErrorCode::kUnsupported, {"w2", "-2048"});
    RoutedInput odd = call.input();
    odd.x_TD.strides[0] = 68;
    conformance::expect_error(
        outcome_of([&] { routed_experts(context, odd, call.weights(), call.y.view()); }),
        ErrorCode::kUnsupported, {"x", "16 bytes", "68"});
    routed_experts(context, call.input(), call.weights(), call.y.view());
    context.check();
    EXPECT_EQ(conformance::first_violation(problem, call.y_rows()), "");
  });
}

TEST_F(CudaForward, WhatTheBackendCannotDoIsRefused) {
  const MoeProblem problem =
      conformance::make_problem({8, 64, 32, 4, 2}, RoutePattern::kDistinct, 1);
  const auto expect_refused = [&](const std::function<void(Config&)>& adjust,
                                  const std::vector<std::string>& words) {
    Config config = conformance::config_of(problem, cuda_case({0}), {}, 8);
    adjust(config);
    conformance::expect_error(
        outcome_of([&] { Context::create(config, {.backend = BackendKind::kCuda}); }),
        ErrorCode::kUnsupported, words);
  };
  expect_refused([](Config& c) { c.hidden_dim = 60; }, {"hidden_dim", "60", "8"});
  expect_refused([](Config& c) { c.num_experts = 300, c.top_k = 256; }, {"top_k", "256", "255"});
}

}  // namespace
}  // namespace distmoe::gpu
