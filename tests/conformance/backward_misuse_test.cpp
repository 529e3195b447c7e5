// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a backward that breaks the contract on one rank is refused on every rank, with the
// name of what is wrong; no byte of any destination changes, the forward stays live, and the right
// call that follows gives the right gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

#include "conformance/moe_gradients.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

class BackwardMisuse : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, BackwardMisuse, testing::ValuesIn(training_cases()), case_name);

/// The arguments of one rank's backward, to be spoilt.
struct BackwardArgs {
  TensorView dy;
  ExpertWeights weights;
  RoutedGradients gradients;
};

struct BackwardMisuseCase {
  std::string name;
  std::function<void(BackwardArgs&)> spoil;
  std::vector<std::string> words;
};

TensorView reshaped(TensorView view, std::initializer_list<std::int64_t> shape) {
  return {view.data, view.dtype, shape, view.device};
}

TensorView with_dtype(TensorView view, DType dtype) {
  view.dtype = dtype;
  return view;
}

// Misuses for a rank with at least two tokens and experts. D = 10, F = 6, K = 2.

using Misuses = std::vector<BackwardMisuseCase>;

Misuses misuses_of_dy_and_weights() {
  return {
      {"dy of other tokens", [](auto& a) { a.dy.shape[0] += 1; }, {"dy must have shape"}},
      {"dy of another width", [](auto& a) { a.dy.shape[1] = 9; }, {"dy must have shape", "10]"}},
      {"dy in FP32", [](auto& a) { a.dy = with_dtype(a.dy, DType::kF32); }, {"dy must be bf16"}},
      {"dy without memory", [](auto& a) { a.dy.data = nullptr; }, {"dy has a null data pointer"}},
      {"dy by columns",
       [](auto& a) {
         a.dy.strides = {1, a.dy.shape[0]};
       },
       {"dy needs stride 1"}},
      {"other weights", [](auto& a) { a.weights.w2_LDF.shape[2] = 5; }, {"w2 must have shape"}},
  };
}

Misuses misuses_of_grad_x_and_scores() {
  return {
      {"grad_x of another width",
       [](auto& a) { a.gradients.grad_x_TD.shape[1] = 9; },
       {"grad_x must have shape"}},
      {"grad_x with overlapping rows",
       [](auto& a) { a.gradients.grad_x_TD.strides[0] = 3; },
       {"rows of grad_x overlap"}},
      {"grad_scores of another type",
       [](auto& a) {
         a.gradients.grad_scores_TK = with_dtype(a.gradients.grad_scores_TK, DType::kBF16);
       },
       {"grad_scores must be f32"}},
      {"grad_scores of another shape",
       [](auto& a) { a.gradients.grad_scores_TK.shape[1] = 3; },
       {"grad_scores must have shape"}},
      {"grad_scores with gaps",
       [](auto& a) { a.gradients.grad_scores_TK.strides[0] = 5; },
       {"grad_scores must be contiguous"}},
      {"grad_x in FP32",
       [](auto& a) { a.gradients.grad_x_TD = with_dtype(a.gradients.grad_x_TD, DType::kF32); },
       {"grad_x must be bf16"}},
  };
}

Misuses misuses_of_weight_gradients() {
  return {
      {"grad_w13 of another shape",
       [](auto& a) { a.gradients.grad_w13_L2FD.tensor.shape[1] = 11; },
       {"grad_w13 must have shape", "12, 10]"}},
      {"grad_w13 in FP16",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_w13_L2FD.tensor;
         tensor = with_dtype(tensor, DType::kF16);
       },
       {"grad_w13 must be bf16 or f32"}},
      {"grad_w13 transposed",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_w13_L2FD.tensor;
         tensor.strides = {120, 1, 12};
       },
       {"grad_w13 must be contiguous", "strides"}},
      {"grad_w2 of another shape",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_w2_LDF.tensor;
         tensor = reshaped(tensor, {tensor.shape[0], 6, 10});
       },
       {"grad_w2 must have shape"}},
      {"grad_w2 with gaps",
       [](auto& a) { a.gradients.grad_w2_LDF.tensor.strides[0] += 1; },
       {"grad_w2 must be contiguous"}},
      {"grad_w2 without memory",
       [](auto& a) { a.gradients.grad_w2_LDF.tensor.data = nullptr; },
       {"grad_w2 has a null data pointer"}},
  };
}

Misuses misuses_of_places() {
  return {
      {"one place for both weights",
       [](auto& a) { a.gradients.grad_w2_LDF.tensor.data = a.gradients.grad_w13_L2FD.tensor.data; },
       {"overlap in memory"}},
      {"grad_scores in a row of a strided grad_x",
       [](auto& a) {
         TensorView& grad_x = a.gradients.grad_x_TD;
         grad_x.strides[0] = 12;
         a.gradients.grad_scores_TK.data = static_cast<BF16*>(grad_x.data) + 12;
       },
       {"grad_x and grad_scores overlap in memory"}},
      {"grad_w13 in the place of w13",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_w13_L2FD.tensor;
         tensor = with_dtype(tensor, DType::kBF16);
         tensor.data = a.weights.w13_L2FD.data;
       },
       {"grad_w13 and w13 overlap in memory"}},
      {"grad_scores in the place of dy",
       [](auto& a) { a.gradients.grad_scores_TK.data = a.dy.data; },
       {"dy and grad_scores overlap in memory"}},
      {"grad_x in the place of dy",
       [](auto& a) { a.gradients.grad_x_TD = a.dy; },
       {"dy and grad_x overlap in memory"}},
      {"the last row of grad_x in the first of dy",
       [](auto& a) {
         TensorView& grad_x = a.gradients.grad_x_TD;
         grad_x.strides[0] = 24;
         grad_x.data = static_cast<BF16*>(a.dy.data) - (grad_x.shape[0] - 1) * 24;
       },
       {"dy and grad_x overlap in memory"}},
      {"grad_x in w2",
       [](auto& a) { a.gradients.grad_x_TD.data = a.weights.w2_LDF.data; },
       {"grad_x and w2 overlap in memory"}},
      {"grad_w2 in the place of an expert of a strided w2",
       [](auto& a) {
         // Memory of its own: beyond the weights of the call other tensors may lie.
         static std::vector<BF16> memory;
         TensorView& w2 = a.weights.w2_LDF;
         w2.strides[0] *= 2;
         memory.assign(static_cast<std::size_t>(w2.shape[0] * w2.strides[0]), BF16{});
         w2.data = memory.data();
         TensorView& tensor = a.gradients.grad_w2_LDF.tensor;
         tensor = with_dtype(tensor, DType::kBF16);
         tensor.data = static_cast<BF16*>(w2.data) + w2.strides[0];
       },
       {"grad_w2 and w2 overlap in memory"}},
      {"grad_bias2 in the place of bias2",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_bias2_LD.tensor;
         tensor = with_dtype(tensor, a.weights.bias2_LD.dtype);
         tensor.data = a.weights.bias2_LD.data;
       },
       {"grad_bias2 and bias2 overlap in memory"}},
      {"grad_scores in grad_bias13",
       [](auto& a) { a.gradients.grad_scores_TK.data = a.gradients.grad_bias13_L2F.tensor.data; },
       {"grad_scores and grad_bias13 overlap in memory"}},
  };
}

Misuses misuses_of_biases() {
  return {
      {"grad_bias13 of another shape",
       [](auto& a) { a.gradients.grad_bias13_L2F.tensor.shape[1] = 6; },
       {"grad_bias13 must have shape"}},
      {"grad_bias2 without bias2",
       [](auto& a) { a.weights.bias2_LD = {}; },
       {"grad_bias2 is asked for"}},
      {"the forward's bias2 forgotten",
       [](auto& a) {
         a.weights.bias2_LD = {};
         a.gradients.grad_bias2_LD = {};
       },
       {"bias2 is not given, but the forward had one"}},
      {"the forward's bias13 forgotten",
       [](auto& a) {
         a.weights.bias13_L2F = {};
         a.gradients.grad_bias13_L2F = {};
       },
       {"bias13 is not given, but the forward had one"}},
      {"grad_bias13 with gaps",
       [](auto& a) { a.gradients.grad_bias13_L2F.tensor.strides[0] += 1; },
       {"grad_bias13 must be contiguous"}},
      {"grad_bias13 by columns",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_bias13_L2F.tensor;
         tensor.strides = {1, tensor.shape[0]};
       },
       {"grad_bias13 must be contiguous"}},
      {"grad_bias13 of integers",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_bias13_L2F.tensor;
         tensor = with_dtype(tensor, DType::kI32);
       },
       {"grad_bias13 must be bf16 or f32"}},
      {"grad_bias2 with gaps",
       [](auto& a) { a.gradients.grad_bias2_LD.tensor.strides[0] += 3; },
       {"grad_bias2 must be contiguous"}},
      {"grad_bias2 in FP16",
       [](auto& a) {
         TensorView& tensor = a.gradients.grad_bias2_LD.tensor;
         tensor = with_dtype(tensor, DType::kF16);
       },
       {"grad_bias2 must be bf16 or f32"}},
  };
}

Misuses misuses() {
  Misuses all;
  for (const auto& part : {misuses_of_dy_and_weights, misuses_of_grad_x_and_scores,
                           misuses_of_weight_gradients, misuses_of_places, misuses_of_biases}) {
    std::ranges::move(part(), std::back_inserter(all));
  }
  return all;
}

MoeProblem problem_of(const MoeCase& moe_case, std::uint64_t seed) {
  return make_problem_with_biases({.num_tokens = 5L * moe_case.ranks,
                                   .hidden_dim = 10,
                                   .intermediate_dim = 6,
                                   .num_experts = 3L * moe_case.ranks,
                                   .top_k = 2},
                                  RoutePattern::kDistinct, seed);
}

TEST_P(BackwardMisuse, IsRefusedOnEveryRankAndWritesNothing) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, 470);
  const std::vector<BF16> dy = make_dy(problem, 472);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  for (const std::optional<double> factor : {std::optional<double>(), std::optional(4.0)}) {
    const BackwardForm form{.accumulates = true, .initial = 0.5, .slot_factor = factor};
    const GradientValues expected = run_backward(problem, dy, {}, form);
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      const int rank = communicator->rank();
      Context context =
          make_context(training_config(problem, moe_case, form, 5), moe_case, communicator);
      const RankCall call = pack_rank(problem, {}, counts, rank);
      SavedForward saved = saving_routed_experts(context, call.input, call.weights, call.y_view());
      const RankGradients gradients(problem, dy, form, counts, rank);
      int spoiler = 0;
      for (const BackwardMisuseCase& misuse : misuses()) {
        SCOPED_TRACE(misuse.name);
        BackwardArgs args{gradients.dy(), call.weights, gradients.destinations()};
        if (rank == spoiler) misuse.spoil(args);
        std::vector<std::string> words = misuse.words;
        words.push_back("rank " + std::to_string(spoiler));
        expect_error(outcome_of([&] {
                       routed_experts_backward(context, std::move(saved), args.dy, args.weights,
                                               args.gradients);
                     }),
                     ErrorCode::kInvalidArgument, words);
        EXPECT_TRUE(gradients.is_untouched());
        EXPECT_TRUE(saved.is_live());
        spoiler = (spoiler + 1) % moe_case.ranks;
      }
      routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                              gradients.destinations());
      GradientValues actual = expected;
      gradients.copy_to(actual);
      EXPECT_EQ(first_difference(expected, actual), "");
    });
  }
}

/// With a type in the configuration all destinations of weights have it.
TEST_P(BackwardMisuse, ADestinationOfAnotherTypeThanTheConfigurationsIsRefused) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, 477);
  const std::vector<BF16> dy = make_dy(problem, 479);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const BackwardForm form{.wgrad_dtype = dtype};
    const BackwardForm other{.wgrad_dtype = dtype == DType::kF32 ? DType::kBF16 : DType::kF32};
    const GradientValues expected = run_backward(problem, dy, {}, form);
    GradientValues actual = expected;
    std::mutex mutex;
    run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
      Config config = training_config(problem, moe_case, form, 5);
      config.wgrad_dtype = dtype == DType::kF32 ? WgradDType::kF32 : WgradDType::kBF16;
      EXPECT_EQ(weight_gradient_dtype(config), dtype);
      Context context = make_context(config, moe_case, communicator);
      const RankCall call = pack_rank(problem, form.call, counts, communicator->rank());
      const RankGradients right(problem, dy, form, counts, communicator->rank());
      const RankGradients wrong(problem, dy, other, counts, communicator->rank());
      SavedForward saved = saving_routed_experts(context, call.input, call.weights, call.y_view());
      const auto backward = [&](const RoutedGradients& gradients) {
        routed_experts_backward(context, std::move(saved), right.dy(), call.weights, gradients);
      };
      const std::string words =
          std::string("must be ") + to_string(dtype) + " as Config::wgrad_dtype says";
      RoutedGradients mixed = right.destinations();
      mixed.grad_w13_L2FD = wrong.destinations().grad_w13_L2FD;
      expect_error(outcome_of([&] { backward(mixed); }), ErrorCode::kInvalidArgument,
                   {"grad_w13 " + words});
      mixed = right.destinations();
      mixed.grad_bias2_LD = wrong.destinations().grad_bias2_LD;
      expect_error(outcome_of([&] { backward(mixed); }), ErrorCode::kInvalidArgument,
                   {"grad_bias2 " + words});
      EXPECT_TRUE(right.is_untouched());
      EXPECT_TRUE(wrong.is_untouched());
      backward(right.destinations());
      const std::scoped_lock lock(mutex);
      right.copy_to(actual);
    });
    EXPECT_EQ(first_difference(expected, actual), "");
  }
}

/// [L, 2, F, D] names two halves, which interleaved weights do not have.
TEST_P(BackwardMisuse, HalvesOfInterleavedWeightsAreRefused) {
  const MoeCase& moe_case = GetParam();
  const MoeProblem problem = problem_of(moe_case, 480);
  const std::vector<BF16> dy = make_dy(problem, 482);
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const BackwardForm form{.call = {.w13 = W13Form::kInterleaved}};
  const GradientValues expected = run_backward(problem, dy, {}, form);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context =
        make_context(training_config(problem, moe_case, form, 5), moe_case, communicator);
    const RankCall call = pack_rank(problem, form.call, counts, communicator->rank());
    const RankGradients gradients(problem, dy, form, counts, communicator->rank());
    SavedForward saved = saving_routed_experts(context, call.input, call.weights, call.y_view());
    RoutedGradients halves = gradients.destinations();
    TensorView& grad_w13 = halves.grad_w13_L2FD.tensor;
    grad_w13 = reshaped(grad_w13, {grad_w13.shape[0], 2, 6, 10});
    expect_error(outcome_of([&] {
                   routed_experts_backward(context, std::move(saved), gradients.dy(), call.weights,
                                           halves);
                 }),
                 ErrorCode::kInvalidArgument, {"grad_w13 of shape [L, 2, F, D]", "interleaved"});
    EXPECT_TRUE(gradients.is_untouched());
    call_backward(context, std::move(saved), call, gradients);
    GradientValues actual = expected;
    gradients.copy_to(actual);
    EXPECT_EQ(first_difference(expected, actual), "");
  });
}

}  // namespace
}  // namespace distmoe::conformance
