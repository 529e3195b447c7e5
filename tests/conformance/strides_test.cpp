// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a stride that is accepted is honoured: reversed, repeated, far apart and between gaps;
// a stride of an extent of one means nothing; data is aligned to its element and, on the CPU, to
// nothing more.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Strides : public MoeLaw {};
INSTANTIATE_TEST_SUITE_P(Laws, Strides, testing::ValuesIn(some_cases()), case_name);

MoeShape shape_of(const MoeCase& moe_case) {
  return fit(
      {.num_tokens = 16, .hidden_dim = 10, .intermediate_dim = 6, .num_experts = 8, .top_k = 2},
      moe_case);
}

/// y of every rank where each rank's arguments were changed in the same way.
std::vector<BF16> run_with(const MoeProblem& problem, const MoeCase& moe_case,
                           const std::function<void(Arguments&)>& change,
                           const CallForm& form = {}) {
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  const Config config = config_of(problem, moe_case, form, counts.back() + 1);
  std::vector<BF16> result;
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    Arguments arguments{pack_rank(problem, form, counts, communicator->rank()), {}};
    arguments.y = arguments.packed.y_view();
    change(arguments);
    arguments.call(context);
    std::vector<BF16> mine(static_cast<std::size_t>(arguments.y.num_elements()));
    for (std::int64_t token = 0; token < arguments.y.shape[0]; ++token) {
      std::memcpy(mine.data() + token * problem.shape.hidden_dim,
                  static_cast<const BF16*>(arguments.y.data) + token * arguments.y.strides[0],
                  static_cast<std::size_t>(problem.shape.hidden_dim) * sizeof(BF16));
    }
    auto all = gather_rows(*communicator, mine, counts, problem.shape.hidden_dim);
    if (communicator->rank() == 0) result = std::move(all);
  });
  return result;
}

TEST_P(Strides, RepeatedRowsAndScoresAreHonoured) {
  const MoeShape shape = shape_of(GetParam());
  MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 70);
  const std::vector<BF16> y = run_with(problem, GetParam(), [&](Arguments& a) {
    a.packed.input.x_TD.strides[0] = 0;
    a.packed.input.topk_scores_TK.strides[0] = 0;
    a.packed.input.topk_scores_TK.strides[1] = 0;
  });
  const TokenCounts counts = even_split(shape.num_tokens, GetParam().ranks);
  std::int64_t first = 0;
  for (const std::int64_t count : counts) {  // every token becomes the first of its rank
    for (std::int64_t token = first; token < first + count; ++token) {
      std::copy_n(problem.x_row(first), shape.hidden_dim, problem.x_row(token));
      for (std::int64_t k = 0; k < shape.top_k; ++k) {
        problem.scores[static_cast<std::size_t>(token * shape.top_k + k)] =
            problem.scores[static_cast<std::size_t>(first * shape.top_k)];
      }
    }
    first += count;
  }
  EXPECT_EQ(first_difference(run(problem, single_rank_of(GetParam())), y, shape.hidden_dim), "");
}

TEST_P(Strides, ReversedRowsAreHonoured) {
  const MoeShape shape = shape_of(GetParam());
  const MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 71);
  const auto reverse = [](TensorView& view) {
    if (view.shape[0] == 0) return;
    view.data =
        static_cast<std::byte*>(view.data) +
        (view.shape[0] - 1) * view.strides[0] * static_cast<std::int64_t>(size_of(view.dtype));
    view.strides[0] = -view.strides[0];
  };
  const std::vector<BF16> reversed = run_with(problem, GetParam(), [&](Arguments& a) {
    reverse(a.packed.input.x_TD);
    reverse(a.packed.input.topk_ids_TK);
    reverse(a.packed.input.topk_scores_TK);
    reverse(a.y);
  });
  // run_with reads y through its view: every rank's last token comes first.
  std::vector<BF16> y;
  std::int64_t begin = 0;
  for (const std::int64_t count : even_split(shape.num_tokens, GetParam().ranks)) {
    for (std::int64_t token = begin + count; token-- > begin;) {
      const auto row = reversed.begin() + token * shape.hidden_dim;
      y.insert(y.end(), row, row + shape.hidden_dim);
    }
    begin += count;
  }
  EXPECT_EQ(first_difference(run(problem, single_rank_of(GetParam())), y, shape.hidden_dim), "");
}

TEST_P(Strides, ExpertsMayShareAMatrix) {
  const MoeShape shape = shape_of(GetParam());
  MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 72);
  add_biases(problem, 73);
  for (std::int64_t expert = 1; expert < shape.num_experts; ++expert) {
    const auto share = [&](auto& values) {
      const auto each = static_cast<std::ptrdiff_t>(values.size()) / shape.num_experts;
      std::copy_n(values.begin(), each, values.begin() + expert * each);
    };
    share(problem.gate), share(problem.up), share(problem.down);
    share(problem.gate_bias), share(problem.up_bias), share(problem.down_bias);
  }
  const std::vector<BF16> y = run_with(problem, GetParam(), [&](Arguments& a) {
    ExpertWeights& w = a.packed.weights;
    for (TensorView* view : {&w.w13_L2FD, &w.w2_LDF, &w.bias13_L2F, &w.bias2_LD}) {
      view->strides[0] = 0;
    }
  });
  EXPECT_EQ(first_difference(run(problem, single_rank_of(GetParam())), y, shape.hidden_dim), "");
}

TEST_P(Strides, StridesOfExtentsOfOneDoNotMatter) {
  const MoeShape ones = fit({.num_tokens = GetParam().ranks,
                             .hidden_dim = 1,
                             .intermediate_dim = 1,
                             .num_experts = GetParam().ranks,
                             .top_k = 1},
                            GetParam());
  MoeProblem problem = make_problem(ones, RoutePattern::kDistinct, 74);
  add_biases(problem, 75);
  const std::vector<BF16> expected = run(problem, single_rank_of(GetParam()));
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-5}, std::int64_t{1} << 40}) {
    for (const W13Form w13 : {W13Form::kConcatenated, W13Form::kHalves}) {
      const auto change = [&](Arguments& a) {
        RoutedInput& in = a.packed.input;
        ExpertWeights& w = a.packed.weights;
        for (TensorView* view : {&in.x_TD, &in.topk_ids_TK, &in.topk_scores_TK, &w.w13_L2FD,
                                 &w.w2_LDF, &w.bias13_L2F, &w.bias2_LD, &a.y}) {
          for (std::size_t dim = 0; dim < static_cast<std::size_t>(view->rank); ++dim) {
            if (view->shape[dim] == 1) view->strides[dim] = stride;
          }
        }
      };
      EXPECT_EQ(first_difference(expected, run_with(problem, GetParam(), change, {.w13 = w13}),
                                 ones.hidden_dim),
                "")
          << "stride " << stride;
    }
  }
}

/// The same values, one element further in the view's memory, which has room behind.
void move_by_one(TensorView& view) {
  if (view.num_elements() == 0) return;
  auto* const begin = static_cast<std::byte*>(view.data);
  std::memmove(begin + size_of(view.dtype), begin, view.num_bytes());
  view.data = begin + size_of(view.dtype);
}

// reports: A38: x = buf[1:], two bytes off any vector's alignment, and the weights likewise.
TEST_P(Strides, DataOneElementOffIsAcceptedOrNamed) {
  const MoeProblem problem = make_problem(shape_of(GetParam()), RoutePattern::kDistinct, 76);
  using View = TensorView& (*)(Arguments&);
  const std::pair<const char*, View> rows[] = {
      {"x", [](Arguments& a) -> TensorView& { return a.packed.input.x_TD; }},
      {"w13", [](Arguments& a) -> TensorView& { return a.packed.weights.w13_L2FD; }},
      {"w2", [](Arguments& a) -> TensorView& { return a.packed.weights.w2_LDF; }},
      {"y", [](Arguments& a) -> TensorView& { return a.y; }}};
  const bool takes_rows = contract_of(GetParam()).row_step == 1;
  const std::vector<BF16> y = run_with(problem, GetParam(), [&](Arguments& a) {
    move_by_one(a.packed.input.topk_ids_TK);
    move_by_one(a.packed.input.topk_scores_TK);
    if (!takes_rows) return;
    for (const auto& [name, view] : rows) move_by_one(view(a));
  });
  EXPECT_EQ(first_difference(run(problem, single_rank_of(GetParam())), y, problem.shape.hidden_dim),
            "");
  if (takes_rows) return;
  for (const auto& [name, view] : rows) {
    expect_error(outcome_of([&, move = view] {
                   run_with(problem, GetParam(), [&](Arguments& a) { move_by_one(move(a)); });
                 }),
                 ErrorCode::kUnsupported, {std::string("rows of ") + name, "16 bytes"});
  }
}

/// y may take the place of x: x is read before y is written.
TEST_P(Strides, YMayTakeThePlaceOfX) {
  const MoeShape shape = shape_of(GetParam());
  const MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 77);
  const std::vector<BF16> y =
      run_with(problem, GetParam(), [](Arguments& a) { a.y = a.packed.input.x_TD; });
  EXPECT_EQ(first_difference(run(problem, single_rank_of(GetParam())), y, shape.hidden_dim), "");
}

}  // namespace
}  // namespace distmoe::conformance
