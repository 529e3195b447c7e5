// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on the CPU rows and experts lie as far apart as an address space is wide.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"
#include "formats/sparse_memory.hpp"

namespace distmoe::conformance {
namespace {

using testing::SparseMemory;

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
  Context context = make_context(config_of(problem, {}, {}, 3), {}, nullptr);
  RankCall call = pack_rank(problem, {}, {3}, 0);
  TensorView y = call.y_view();
  for (TensorView* view : {&call.input.x_TD, &call.input.topk_ids_TK, &call.weights.w13_L2FD,
                           &call.weights.w2_LDF, &y}) {
    spread(*view);
  }
  routed_experts(context, call.input, call.weights, y);
  std::vector<BF16> rows;
  for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
    const auto* row = static_cast<const BF16*>(y.data) + token * kFar;
    rows.insert(rows.end(), row, row + shape.hidden_dim);
  }
  EXPECT_EQ(first_difference(run(problem, {}), rows, shape.hidden_dim), "");
}

}  // namespace
}  // namespace distmoe::conformance
