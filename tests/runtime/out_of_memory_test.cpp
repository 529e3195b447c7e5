// SPDX-License-Identifier: Apache-2.0
//
// Invariant: wherever the system gives no memory, a caller gets Error(out_of_memory) and no other
// exception; what was made before it still works, or is closed and says so.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"
#include "core/failing_allocations.hpp"
#include "distmoe/distmoe.hpp"

/// oneDNN keeps some of a kernel whose making it could not finish.
// NOTE: the sanitizer looks for it from a library of its own.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:libdnnl";
}

namespace distmoe {
namespace {

using conformance::MoeCase;
using conformance::MoeProblem;
using testing::Act;
using testing::countdown;
using testing::expect_errors;
using testing::num_errors;

/// A layer of one rank with everything that a call of `moe_case` takes.
struct Layer {
  MoeCase moe_case;
  MoeProblem problem;
  conformance::TokenCounts counts{9};
  conformance::BackwardForm form{.options = {.norm = PostExpertNorm{.eps = 1e-5}}};
  Config inference, training;
  conformance::RankCall call;

  explicit Layer(Precision precision)
      : moe_case{.num_threads = 2, .precision = precision, .is_prepared = true},
        problem(conformance::make_problem_with_biases({.num_tokens = 9,
                                                       .hidden_dim = 64,
                                                       .intermediate_dim = 32,
                                                       .num_experts = 4,
                                                       .top_k = 2},
                                                      conformance::RoutePattern::kMixed, 970)),
        inference(conformance::config_of(problem, moe_case, {}, 9)),
        training(conformance::training_config(problem, moe_case, form, 9)),
        call(conformance::pack_rank(problem, {}, counts, 0)) {
    if (precision == Precision::kBF16) return;
    // Of inference; a training context takes the BF16 weights.
    conformance::CallForm prepared;
    prepared.prepared = BlockScaledConfig{precision, true};
    call = conformance::pack_rank(problem, prepared, counts, 0);
  }
  Context context(const Config& config) const {
    return conformance::make_context(config, moe_case, nullptr);
  }
  ExpertWeights bf16_weights() const {
    ExpertWeights weights = call.weights;
    weights.prepared_w13 = weights.prepared_w2 = {};
    weights.w13_L2FD = call.w13.view();
    weights.w2_LDF = call.w2.view();
    return weights;
  }
  SavedForward save(Context& context) const {
    return saving_routed_experts(context, call.input, bf16_weights(), call.y_view(), form.options);
  }
};

TEST(OutOfMemory, OfPlansAndContexts) {
  for (const Precision precision : {Precision::kBF16, Precision::kMXFP8}) {
    const Layer layer(precision);
    expect_errors("plan_memory", [&](const Act& act) {
      act([&] { static_cast<void>(plan_memory(layer.training, 3)); });
    });
    const MemoryPlan plan = plan_memory(layer.training, 3);
    expect_errors("explain", [&](const Act& act) {
      act([&] { static_cast<void>(explain(layer.training, plan)); });
    });
    expect_errors("Context::create",
                  [&](const Act& act) { act([&] { layer.context(layer.training); }); });
  }
}

TEST(OutOfMemory, OfBudgetsAndSchedules) {
  const std::vector<PipelineAction> actions{{.kind = PipelineActionKind::kForward},
                                            {.kind = PipelineActionKind::kBackward}};
  const std::vector<PipelineStage> stages{{.stage = 0, .num_moe_layers = 2}};
  const Config config = Layer(Precision::kMXFP8).inference;
  expect_errors("check_budget", [&](const Act& act) {
    act([&] { static_cast<void>(check_budget(config, 3, 1 << 20)); });
  });
  expect_errors("assign_activation_slots", [&](const Act& act) {
    act([&] { static_cast<void>(assign_activation_slots(actions, stages, 1)); });
  });
}

TEST(OutOfMemory, OfForwards) {
  for (const Precision precision :
       {Precision::kBF16, Precision::kMXFP8, Precision::kNVFP4, Precision::kMXFP4}) {
    const Layer layer(precision);
    expect_errors("routed_experts", [&](const Act& act) {
      Context context = layer.context(layer.inference);
      act([&] {
        routed_experts(context, layer.call.input, layer.call.weights, layer.call.y_view());
      });
    });
    expect_errors("check_routed_experts", [&](const Act& act) {
      Context context = layer.context(layer.inference);
      TensorView wrong = layer.call.y_view();
      wrong.shape[1] += 1;
      act([&] {
        try {
          check_routed_experts(context, layer.call.input, layer.call.weights, wrong);
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kInvalidArgument) throw;
        }
      });
    });
  }
}

TEST(OutOfMemory, OfSavingForwardsAndBackwards) {
  for (const Precision precision : {Precision::kBF16, Precision::kMXFP8}) {
    const Layer layer(precision);
    expect_errors("saving_routed_experts", [&](const Act& act) {
      Context context = layer.context(layer.training);
      act([&] { static_cast<void>(layer.save(context)); });
    });
    const std::vector<BF16> dy = conformance::make_dy(layer.problem, 971);
    const conformance::RankGradients gradients(layer.problem, dy, layer.form, layer.counts, 0);
    const ExpertWeights weights = layer.bf16_weights();
    const RoutedGradients destinations = gradients.destinations();
    expect_errors("routed_experts_backward", [&](const Act& act) {
      Context context = layer.context(layer.training);
      SavedForward saved = layer.save(context);
      act([&] {
        routed_experts_backward(context, std::move(saved), gradients.dy(), weights, destinations,
                                layer.form.options);
      });
    });
  }
}

TEST(OutOfMemory, OfWhatAContextSays) {
  const Layer layer(Precision::kMXFP8);
  const auto say = [&](const char* what, const std::function<void(Context&)>& body) {
    expect_errors(what, [&](const Act& act) {
      Context context = layer.context(layer.training);
      const SavedForward saved = layer.save(context);
      act([&] { body(context); });
    });
  };
  say("last_call", [](Context& context) { static_cast<void>(context.last_call()); });
  say("region_peaks", [](Context& context) { static_cast<void>(context.region_peaks()); });
  say("agree", [](Context& context) { agree(context, std::nullopt); });
  say("select_activation_slot", [](Context& context) {
    try {
      context.select_activation_slot(7, 1);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
    }
  });
}

TEST(OutOfMemory, OfWeightsAndMatrices) {
  const Layer layer(Precision::kMXFP8);
  const TensorView weight = layer.call.w13.view();
  for (const BlockScaledConfig& config :
       {BlockScaledConfig{Precision::kMXFP8, false}, BlockScaledConfig{Precision::kMXFP8, true},
        BlockScaledConfig{Precision::kNVFP4, true}, BlockScaledConfig{Precision::kMXFP4, true}}) {
    expect_errors("prepare_block_scaled_weight", [&](const Act& act) {
      act([&] { prepare_block_scaled_weight(weight, config); });
    });
    const PreparedWeight prepared = prepare_block_scaled_weight(weight, config);
    // A refill that has begun cannot fail.
    EXPECT_EQ(num_errors("refill_prepared_weight",
                         [&](const Act& act) {
                           act([&] { refill_prepared_weight(weight, prepared.view()); });
                         }),
              0);
  }
  std::vector<std::uint8_t> codes(64 * 64), scales(64 * 4);
  std::vector<float> factors(64), decoded(64 * 64);
  for (const Precision format : {Precision::kMXFP8, Precision::kMXFP4, Precision::kNVFP4}) {
    QuantisedMatrix matrix = quantised_layout(format, BlockShape::kRows, 64, 64);
    matrix.codes.data = codes.data();
    matrix.scales.data = scales.data();
    if (matrix.factors.is_given()) matrix.factors.data = factors.data();
    expect_errors("dequantise", [&](const Act& act) {
      act([&] { dequantise(matrix, {decoded.data(), DType::kF32, {64, 64}}); });
    });
    const TensorView short_by_a_row{layer.call.w13.view().data, DType::kBF16, {63, 64}};
    expect_errors("the refusal of quantise", [&](const Act& act) {
      act([&] {
        try {
          quantise(short_by_a_row, matrix);
        } catch (const Error& error) {
          if (error.code() != ErrorCode::kInvalidArgument) throw;
        }
      });
    });
  }
}

/// A rank that gives up a call without the words to say so leaves nothing of it with its peers.
TEST(OutOfMemory, OfARankThatWaitedInVain) {
  const auto group = make_thread_group(2);
  const std::vector<std::byte> sent(8);
  std::vector<std::byte> received(8);
  const auto exchange = [&](int rank, std::int64_t allocations) {
    const std::vector<std::span<const std::byte>> send{sent, sent};
    const std::vector<std::span<std::byte>> receive{received, received};
    countdown = allocations;
    group[static_cast<std::size_t>(rank)]->alltoallv(send, receive, std::chrono::milliseconds(20));
  };
  const conformance::Outcome first = conformance::outcome_of([&] { exchange(0, 0); });
  EXPECT_LT(countdown.exchange(-1), 0);
  conformance::expect_error(first, ErrorCode::kOutOfMemory, {"no memory"});
  conformance::expect_error(conformance::outcome_of([&] { exchange(1, -1); }), ErrorCode::kPeerLost,
                            {"no memory left"});
}

/// At once, wherever they are: no 60 s of waiting.
TEST(OutOfMemory, OfOneRankIsHeardOfByTheOther) {
  const Layer layer(Precision::kMXFP8);
  const MoeCase two{.ranks = 2, .num_threads = 2, .precision = Precision::kMXFP8};
  const Config config = conformance::config_of(layer.problem, two, {}, 5);
  bool is_reached = true;
  for (std::int64_t nth = 0; is_reached; ++nth) {
    std::atomic<int> num_errors{0};
    const conformance::Outcome all = conformance::outcome_of([&] {
      conformance::run_group(two, [&](const std::shared_ptr<Communicator>& communicator) {
        const conformance::RankCall call =
            conformance::pack_rank(layer.problem, {}, {5, 4}, communicator->rank());
        communicator->barrier(std::chrono::seconds(60));
        if (communicator->rank() == 0) countdown = nth;
        std::string ended = "well";
        try {
          Context context = conformance::make_context(config, two, communicator);
          routed_experts(context, call.input, call.weights, call.y_view());
        } catch (const Error& error) {
          const bool is_due =
              error.code() == ErrorCode::kOutOfMemory || error.code() == ErrorCode::kPeerLost;
          if (!is_due) ended = error.what();
          ++num_errors;
        } catch (const std::exception& error) {
          ended = error.what();
        }
        EXPECT_EQ(ended, "well") << "allocation " << nth;
      });
    });
    is_reached = countdown.exchange(-1) < 0;
    // Both, unless the other rank has its results already.
    EXPECT_EQ(num_errors > 0, is_reached) << "allocation " << nth;
    EXPECT_LT(all.seconds, 20) << "allocation " << nth;
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace distmoe
