// SPDX-License-Identifier: Apache-2.0
//
// Invariant: gradients of weights with more than 2^31 elements lie where they belong; experts
// without rows, and so most of the memory, are not touched where gradients are added up.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "conformance/moe_gradients.hpp"

namespace distmoe::conformance {
namespace {

/// Zeros without memory: pages come into being where they are touched.
class SparseZeros {
 public:
  explicit SparseZeros(std::size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseZeros() {
    if (is_given()) munmap(base_, bytes_);
  }
  SparseZeros(const SparseZeros&) = delete;
  SparseZeros& operator=(const SparseZeros&) = delete;
  bool is_given() const { return base_ != MAP_FAILED; }
  void* base() const { return base_; }
  std::int64_t resident_pages(std::int64_t first_byte, std::int64_t num_bytes) const {
    constexpr std::int64_t kPage = 4096;
    std::vector<unsigned char> pages(static_cast<std::size_t>(num_bytes / kPage));
    EXPECT_EQ(
        mincore(static_cast<std::byte*>(base_) + first_byte, pages.size() * kPage, pages.data()),
        0);
    return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1U) != 0; });
  }

 private:
  std::size_t bytes_;
  void* base_;
};

// reports: A77, A78, A79: the first expert and one behind 2^31 elements, of many that share their
// weights, have the gradients of two experts alone.
TEST(BackwardBeyond31Bits, WeightGradientsLieWhereTheyBelong) {
  constexpr std::int64_t kExperts = 2200;
  MoeProblem problem = make_problem(
      {.num_tokens = 6, .hidden_dim = 1024, .intermediate_dim = 512, .num_experts = 2, .top_k = 2},
      RoutePattern::kDistinct, 430);
  const auto share = [](std::vector<BF16>& values) {
    std::copy_n(values.begin(), values.size() / 2, values.begin() + std::ssize(values) / 2);
  };
  share(problem.gate), share(problem.up), share(problem.down);
  const std::vector<BF16> dy = make_dy(problem, 431);
  const BackwardForm form{.accumulates = true};
  const GradientValues expected = run_backward(problem, dy, {}, form);

  const MoeShape& s = problem.shape;
  const std::int64_t w2_size = s.hidden_dim * s.intermediate_dim;
  ASSERT_GT((kExperts - 1) * 2 * w2_size, std::int64_t{1} << 31);
  const SparseZeros grad_w13(static_cast<std::size_t>(kExperts * 2 * w2_size) * sizeof(float));
  const SparseZeros grad_w2(static_cast<std::size_t>(kExperts * w2_size) * sizeof(float));
  if (!grad_w13.is_given() || !grad_w2.is_given()) {
    GTEST_SKIP() << "this machine gives no 15 GiB of address space";
  }
  RankCall call = pack_rank(problem, {}, {s.num_tokens}, 0);
  std::vector<std::int32_t> ids;
  ids.reserve(problem.ids.size());
  for (const std::int64_t id : problem.ids) {
    ids.push_back(id == 1 ? static_cast<std::int32_t>(kExperts - 1)
                          : static_cast<std::int32_t>(id));
  }
  call.input.topk_ids_TK = {ids.data(), DType::kI32, {s.num_tokens, s.top_k}};
  for (TensorView* weight : {&call.weights.w13_L2FD, &call.weights.w2_LDF}) {
    weight->shape[0] = kExperts;
    weight->strides[0] = 0;
  }
  Config config = training_config(problem, {}, form, s.num_tokens);
  config.num_experts = kExperts;
  Context context = make_context(config, {}, nullptr);
  SavedForward saved = saving_routed_experts(context, call.input, call.weights, call.y_view());
  const RankGradients small(problem, dy, form, {s.num_tokens}, 0);
  RoutedGradients gradients = small.destinations();
  gradients.grad_w13_L2FD.tensor = {
      grad_w13.base(), DType::kF32, {kExperts, 2 * s.intermediate_dim, s.hidden_dim}};
  gradients.grad_w2_LDF.tensor = {
      grad_w2.base(), DType::kF32, {kExperts, s.hidden_dim, s.intermediate_dim}};
  routed_experts_backward(context, std::move(saved), small.dy(), call.weights, gradients);

  // Into the small destinations, from where the first and the last expert are.
  const auto bring = [&](const SparseZeros& from, std::int64_t size, const TensorView& to) {
    const auto bytes = static_cast<std::size_t>(size) * sizeof(float);
    const auto* first = static_cast<const std::byte*>(from.base());
    std::memcpy(to.data, first, bytes);
    std::memcpy(static_cast<std::byte*>(to.data) + bytes,
                first + static_cast<std::size_t>(kExperts - 1) * bytes, bytes);
    EXPECT_EQ(from.resident_pages(size * 4, (kExperts - 2) * size * 4), 0);
  };
  bring(grad_w13, 2 * w2_size, small.destinations().grad_w13_L2FD.tensor);
  bring(grad_w2, w2_size, small.destinations().grad_w2_LDF.tensor);
  GradientValues actual(problem);
  small.copy_to(actual);
  EXPECT_EQ(first_difference(expected, actual), "");
}

}  // namespace
}  // namespace distmoe::conformance
