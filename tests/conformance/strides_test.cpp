// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a stride that is accepted is honoured: reversed, repeated, far apart and between gaps;
// a stride of an extent of one means nothing; data is aligned to its element and to nothing more.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_refusal.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {
namespace {

class Strides : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Laws, Strides, testing::ValuesIn(some_cases()), case_name);

constexpr MoeShape kShape{
    .num_tokens = 16, .hidden_dim = 10, .intermediate_dim = 6, .num_experts = 8, .top_k = 2};

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
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 70);
  const std::vector<BF16> y = run_with(problem, GetParam(), [&](Arguments& a) {
    a.packed.input.x_TD.strides[0] = 0;
    a.packed.input.topk_scores_TK.strides[0] = 0;
    a.packed.input.topk_scores_TK.strides[1] = 0;
  });
  const TokenCounts counts = even_split(kShape.num_tokens, GetParam().ranks);
  std::int64_t first = 0;
  for (const std::int64_t count : counts) {  // every token becomes the first of its rank
    for (std::int64_t token = first; token < first + count; ++token) {
      std::copy_n(problem.x_row(first), kShape.hidden_dim, problem.x_row(token));
      for (std::int64_t k = 0; k < kShape.top_k; ++k) {
        problem.scores[static_cast<std::size_t>(token * kShape.top_k + k)] =
            problem.scores[static_cast<std::size_t>(first * kShape.top_k)];
      }
    }
    first += count;
  }
  EXPECT_EQ(first_difference(run(problem, {}), y, kShape.hidden_dim), "");
}

TEST_P(Strides, ReversedRowsAreHonoured) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 71);
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
  for (const std::int64_t count : even_split(kShape.num_tokens, GetParam().ranks)) {
    for (std::int64_t token = begin + count; token-- > begin;) {
      const auto row = reversed.begin() + token * kShape.hidden_dim;
      y.insert(y.end(), row, row + kShape.hidden_dim);
    }
    begin += count;
  }
  EXPECT_EQ(first_difference(run(problem, {}), y, kShape.hidden_dim), "");
}

TEST_P(Strides, ExpertsMayShareAMatrix) {
  MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 72);
  add_biases(problem, 73);
  for (std::int64_t expert = 1; expert < kShape.num_experts; ++expert) {
    const auto share = [&](auto& values) {
      const auto each = static_cast<std::ptrdiff_t>(values.size()) / kShape.num_experts;
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
  EXPECT_EQ(first_difference(run(problem, {}), y, kShape.hidden_dim), "");
}

TEST_P(Strides, StridesOfExtentsOfOneDoNotMatter) {
  const MoeShape ones{.num_tokens = GetParam().ranks,
                      .hidden_dim = 1,
                      .intermediate_dim = 1,
                      .num_experts = GetParam().ranks,
                      .top_k = 1};
  MoeProblem problem = make_problem(ones, RoutePattern::kDistinct, 74);
  add_biases(problem, 75);
  const std::vector<BF16> expected = run(problem, {});
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
      EXPECT_EQ(first_difference(expected, run_with(problem, GetParam(), change, {.w13 = w13}), 1),
                "")
          << "stride " << stride;
    }
  }
}

// reports: A38: x = buf[1:], two bytes off any vector's alignment, and the weights likewise.
TEST_P(Strides, DataOneElementOffIsAccepted) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 76);
  std::vector<std::vector<std::byte>> moved;
  std::mutex mutex;
  const std::vector<BF16> y = run_with(problem, GetParam(), [&](Arguments& a) {
    const auto move = [&](TensorView& view) {
      const std::size_t element = size_of(view.dtype);
      std::vector<std::byte> copy(view.num_bytes() + 64 + element);
      const auto base = reinterpret_cast<std::uintptr_t>(copy.data());
      std::byte* at = copy.data() + (64 - base % 64) + element;
      std::memcpy(at, view.data, view.num_bytes());
      view.data = at;
      const std::scoped_lock lock(mutex);
      moved.push_back(std::move(copy));
    };
    move(a.packed.input.x_TD), move(a.packed.input.topk_ids_TK);
    move(a.packed.input.topk_scores_TK), move(a.packed.weights.w13_L2FD);
    move(a.packed.weights.w2_LDF), move(a.y);
  });
  EXPECT_EQ(first_difference(run(problem, {}), y, kShape.hidden_dim), "");
}

/// y may take the place of x: x is read before y is written.
TEST_P(Strides, YMayTakeThePlaceOfX) {
  const MoeProblem problem = make_problem(kShape, RoutePattern::kDistinct, 77);
  const std::vector<BF16> y =
      run_with(problem, GetParam(), [](Arguments& a) { a.y = a.packed.input.x_TD; });
  EXPECT_EQ(first_difference(run(problem, {}), y, kShape.hidden_dim), "");
}

/// Address space without memory: pages come into being where they are touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (is_given()) munmap(base_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool is_given() const { return base_ != MAP_FAILED; }
  std::byte* base() const { return static_cast<std::byte*>(base_); }

 private:
  std::size_t bytes_;
  void* base_;
};

// reports: A77, A78, A79: rows and experts more than 2^31 elements apart, really read and written.
TEST(StridesBeyond31Bits, RowsAndExpertsFarApartAreHonoured) {
  const MoeShape shape{
      .num_tokens = 3, .hidden_dim = 5, .intermediate_dim = 4, .num_experts = 3, .top_k = 2};
  const MoeProblem problem = make_problem(shape, RoutePattern::kDistinct, 78);
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;  // elements
  const SparseMemory memory(std::size_t{100} << 30);
  if (!memory.is_given()) GTEST_SKIP() << "this machine gives no 100 GiB of address space";
  std::byte* next = memory.base();
  const auto spread = [&](TensorView& view) {
    const auto row_bytes = view.num_bytes() / static_cast<std::size_t>(view.shape[0]);
    const auto far_bytes = static_cast<std::size_t>(kFar) * size_of(view.dtype);
    for (std::size_t row = 0; row < static_cast<std::size_t>(view.shape[0]); ++row) {
      std::memcpy(next + row * far_bytes, static_cast<std::byte*>(view.data) + row * row_bytes,
                  row_bytes);
    }
    view.data = next;
    view.strides[0] = kFar;
    next += static_cast<std::size_t>(view.shape[0]) * far_bytes;
  };
  const std::vector<BF16> y = run_with(problem, {}, [&](Arguments& a) {
    spread(a.packed.input.x_TD);
    spread(a.packed.input.topk_ids_TK);
    spread(a.packed.weights.w13_L2FD);
    spread(a.packed.weights.w2_LDF);
    spread(a.y);
  });
  EXPECT_EQ(first_difference(run(problem, {}), y, shape.hidden_dim), "");
}

}  // namespace
}  // namespace distmoe::conformance
