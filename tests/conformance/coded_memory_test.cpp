// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a call of a low precision reads nothing that it did not write, takes the bytes that
// its pipeline's plan names and no more.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"
#include "plan/option_names.hpp"
#include "plan/scratch_layout.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe::conformance {
namespace {

/// Experts of 44 rows and less: partial blocks of 32, and padding behind them.
MoeProblem problem_of(std::uint64_t seed) {
  MoeProblem problem = make_problem(
      {.num_tokens = 61, .hidden_dim = 96, .intermediate_dim = 64, .num_experts = 5, .top_k = 3},
      RoutePattern::kMixed, seed);
  add_biases(problem, seed + 1);
  return problem;
}

/// All that a call of one rank works in.
void fill_memory(Context& context, std::byte garbage) {
  const auto& memory = dynamic_cast<cpu::CpuBackend&>(*context.impl().backend()).memory();
  for (const std::span<std::byte> bytes :
       {memory.activations(), memory.buffer(buffer_name::kRouteResults),
        memory.buffer(buffer_name::kWorkspace)}) {
    std::ranges::fill(bytes, garbage);
  }
}

// reports: A42, A58, A85: padding rows and what earlier calls left are in no result.
TEST(CodedMemory, WhatIsInItBeforeATrainingCallIsNeverRead) {
  const MoeProblem problem = problem_of(750);
  const std::vector<BF16> dy = make_dy(problem, 751);
  const MoeCase moe_case{.num_threads = 2, .precision = Precision::kMXFP8};
  const TokenCounts counts{61};
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(1.0)}) {
    const BackwardForm form{.slot_factor = factor};
    const GradientValues expected = run_backward(problem, dy, moe_case, form);
    for (const int garbage : {0x00, 0x7F, 0xFF}) {
      Context context =
          make_context(training_config(problem, moe_case, form, 61), moe_case, nullptr);
      fill_memory(context, static_cast<std::byte>(garbage));
      const RankCall call = pack_rank(problem, {}, counts, 0);
      const RankGradients gradients(problem, dy, form, counts, 0);
      call_backward(context, call_saving(context, call), call, gradients);
      GradientValues actual(problem);
      gradients.copy_to(actual);
      EXPECT_EQ(first_difference(expected, actual), "") << garbage;
    }
  }
}

// reports: A42, A58, A85
TEST(CodedMemory, WhatIsInItBeforeAnInferenceCallIsNeverRead) {
  const MoeProblem problem = problem_of(760);
  const TokenCounts counts{61};
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4, Precision::kMXFP4}) {
    const MoeCase moe_case{.num_threads = 2, .precision = precision, .is_prepared = true};
    const std::vector<BF16> expected = run(problem, moe_case);
    for (const int garbage : {0x00, 0x7F, 0xFF}) {
      Context context = make_context(config_of(problem, moe_case, {}, 61), moe_case, nullptr);
      fill_memory(context, static_cast<std::byte>(garbage));
      const RankCall call = pack_rank(problem, form_of(moe_case), counts, 0);
      call_experts(context, call);
      EXPECT_EQ(first_difference(expected, call.y_rows(), problem.shape.hidden_dim), "")
          << option_name(precision) << " " << garbage;
    }
  }
}

// ---- Codes across rows

/// The regions of a training context of one rank where codes across rows would lie in scratch.
class ColumnRegions {
 public:
  ColumnRegions(Context& context, const MoeProblem& problem)
      : memory_(dynamic_cast<cpu::CpuBackend&>(*context.impl().backend()).memory().activations()) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(problem.shape.num_experts));
    for (const std::int64_t id : problem.ids) {
      if (id >= 0) ++rows[static_cast<std::size_t>(id)];
    }
    std::int64_t placed = 0;
    for (const std::int64_t count : rows) placed += (count + 127) / 128 * 128;
    const LayerDims dims = layer_dims(context.config());
    sizes_ = LayerBytes<>{dims}.scratch_regions(placed);
    offsets_ = scratch_layout(dims, placed, std::ssize(memory_));
  }
  /// Which of x, h2, grad_h3 and grad_h1 were written since fill_memory(kGarbage).
  std::vector<bool> written() const {
    return {is_written(offsets_.x, sizes_.x), is_written(offsets_.h2, sizes_.h2),
            is_written(offsets_.grad_h3, sizes_.grad_h3),
            is_written(offsets_.grad_h1, sizes_.grad_h1)};
  }
  static constexpr std::byte kGarbage{0xA5};

 private:
  bool is_written(std::int64_t offset, std::int64_t size) const {
    const auto bytes =
        memory_.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size));
    return std::ranges::any_of(bytes, [](std::byte byte) { return byte != kGarbage; });
  }

  std::span<std::byte> memory_;
  LayerRegions sizes_;
  RegionOffsets offsets_;
};

/// No forward that keeps nothing makes any, nor one that is computed again; a backward makes those
/// of the weights' gradients that are asked for.
TEST(CodedMemory, CodesAcrossRowsAreMadeForTheWeightsGradientsAlone) {
  const MoeProblem problem = problem_of(770);
  const std::vector<BF16> dy = make_dy(problem, 771);
  const MoeCase moe_case{.num_threads = 2, .precision = Precision::kMXFP8};
  const TokenCounts counts{61};
  struct Case {
    bool wants_w13, wants_w2;
    std::vector<bool> written;  // of x, h2, grad_h3, grad_h1
  };
  for (const bool is_saved : {false, true}) {
    const BackwardForm form{.slot_factor = is_saved ? std::optional(1.0) : std::nullopt};
    for (const Case& c : {Case{false, false, {false, false, false, false}},
                          Case{true, false, {!is_saved, false, false, true}},
                          Case{false, true, {false, !is_saved, true, false}},
                          Case{true, true, {!is_saved, !is_saved, true, true}}}) {
      Context context =
          make_context(training_config(problem, moe_case, form, 61), moe_case, nullptr);
      const RankCall call = pack_rank(problem, {}, counts, 0);
      const ColumnRegions regions(context, problem);
      fill_memory(context, ColumnRegions::kGarbage);
      call_experts(context, call);
      EXPECT_EQ(regions.written(), (std::vector<bool>{false, false, false, false}));
      SavedForward saved = call_saving(context, call);
      EXPECT_EQ(context.last_call().is_recomputed, !is_saved);
      EXPECT_EQ(regions.written(), (std::vector<bool>{false, false, false, false}));
      const RankGradients gradients(problem, dy, form, counts, 0);
      RoutedGradients some = gradients.destinations();
      if (!c.wants_w13) some.grad_w13_L2FD = {};
      if (!c.wants_w2) some.grad_w2_LDF = {};
      routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights, some);
      EXPECT_EQ(regions.written(), c.written) << is_saved << c.wants_w13 << c.wants_w2;
    }
  }
}

// ---- The bytes of a plan

struct FullCallCase {
  Precision precision;
  bool inference;
  std::int64_t hidden_dim = 96, intermediate_dim = 160;
  bool mega_takes_more = true;
};

/// A full call, whose rows are as many as planned, takes the bytes of its pipeline's plan. In
/// training the rows of gradients of 2F columns are what both pipelines need room for where those
/// of D and F columns together are fewer.
class FullCall : public testing::TestWithParam<FullCallCase> {};
INSTANTIATE_TEST_SUITE_P(Precisions, FullCall,
                         testing::Values(FullCallCase{Precision::kMXFP8, false, 96, 160, false},
                                         FullCallCase{Precision::kMXFP8, false, 160, 96},
                                         FullCallCase{Precision::kMXFP8, true},
                                         FullCallCase{Precision::kNVFP4, true},
                                         FullCallCase{.precision = Precision::kMXFP4,
                                                      .inference = true,
                                                      .mega_takes_more = false}),
                         [](const auto& test) {
                           return std::string(option_name(test.param.precision)) +
                                  (test.param.inference ? "_inference" : "_training") + "_D" +
                                  std::to_string(test.param.hidden_dim);
                         });

TEST_P(FullCall, TakesTheBytesOfItsPipelinesPlan) {
  const auto& [precision, inference, hidden_dim, intermediate_dim, mega_takes_more] = GetParam();
  MoeProblem problem = make_problem({.num_tokens = 256,
                                     .hidden_dim = hidden_dim,
                                     .intermediate_dim = intermediate_dim,
                                     .num_experts = 2,
                                     .top_k = 1},
                                    RoutePattern::kDistinct, 740);
  // 129 and 127 rows: 256 and 128 with the padding, which is the worst that is planned for.
  for (std::size_t token = 0; token < 256; ++token) problem.ids[token] = token < 129 ? 0 : 1;
  const std::vector<BF16> dy = make_dy(problem, 741);
  const bool has_coded_rows = precision != Precision::kMXFP4;
  std::vector<std::int64_t> scratch;
  for (const Pipeline pipeline : {Pipeline::kStaged, Pipeline::kMega}) {
    const MoeCase moe_case{.precision = precision, .pipeline = pipeline, .is_prepared = true};
    const BackwardForm form{.slot_factor = 1.0};
    Config config = training_config(problem, moe_case, form, 256);
    config.inference = inference;
    if (inference) config.activation_slot_capacity_factor.reset();
    Context context = make_context(config, moe_case, nullptr);
    const MemoryPlan& plan = context.memory_plan();
    const TokenCounts counts{256};
    const RankCall call = pack_rank(problem, form_of(moe_case, {}, inference), counts, 0);
    if (inference) {
      call_experts(context, call);
    } else {
      const RankGradients gradients(problem, dy, form, counts, 0);
      SavedForward saved = call_saving(context, call);
      EXPECT_EQ(context.region_peaks().slot_bytes[0], plan.balanced_slot_bytes);
      call_backward(context, std::move(saved), call, gradients);
    }
    if (has_coded_rows) {
      const auto& backend = dynamic_cast<cpu::CpuBackend&>(*context.impl().backend());
      const std::int64_t x_bytes = LayerBytes<>{layer_dims(config)}.row(384, hidden_dim);
      EXPECT_EQ(backend.coded_h2().codes(0) - backend.coded_x().codes(0),
                pipeline == Pipeline::kMega ? x_bytes : 0);
    }
    EXPECT_EQ(plan.device_scratch_rows, has_coded_rows ? 384 : 256);
    EXPECT_EQ(context.region_peaks().device_scratch_bytes, plan.device_scratch_bytes);
    EXPECT_EQ(context.last_call().device_scratch_bytes, plan.device_scratch_bytes);
    scratch.push_back(plan.device_scratch_bytes);
  }
  EXPECT_LE(scratch[0], scratch[1]);
  EXPECT_EQ(scratch[0] < scratch[1], mega_takes_more);
}

}  // namespace
}  // namespace distmoe::conformance
