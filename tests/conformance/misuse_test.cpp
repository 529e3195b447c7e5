// SPDX-License-Identifier: Apache-2.0
//
// Invariant: arguments that break the contract are refused on every rank in the same call,
// whichever rank brought them; the message has the tensor, what was given and what is legal;
// nothing is written and the next correct call works.
#include <gtest/gtest.h>

#include <initializer_list>
#include <limits>

#include "conformance/moe_refusal.hpp"

namespace distmoe::conformance {
namespace {

class MisuseLaws : public MoeLaw {
 protected:
  const MoeShape shape_ = misuse_shape(GetParam());
  const BackendContract contract_ = contract_of(GetParam());
};
INSTANTIATE_TEST_SUITE_P(Laws, MisuseLaws, testing::ValuesIn(some_cases()), case_name);

/// "[4, 12]": the end of a shape.
std::string extents(std::initializer_list<std::int64_t> extents) {
  std::string text;
  for (const std::int64_t extent : extents) text += ", " + std::to_string(extent);
  return text + "]";
}

/// Every tensor of a call and its name in messages.
struct NamedView {
  const char* name;
  TensorView* (*of)(Arguments&);
};
const NamedView kViews[] = {
    {"x", [](Arguments& a) { return &a.packed.input.x_TD; }},
    {"topk_ids", [](Arguments& a) { return &a.packed.input.topk_ids_TK; }},
    {"topk_scores", [](Arguments& a) { return &a.packed.input.topk_scores_TK; }},
    {"w13", [](Arguments& a) { return &a.packed.weights.w13_L2FD; }},
    {"w2", [](Arguments& a) { return &a.packed.weights.w2_LDF; }},
    {"bias13", [](Arguments& a) { return &a.packed.weights.bias13_L2F; }},
    {"bias2", [](Arguments& a) { return &a.packed.weights.bias2_LD; }},
    {"y", [](Arguments& a) { return &a.y; }},
};

// reports: A30, A31
TEST_P(MisuseLaws, OtherTypesAreRefusedByName) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    const bool is_id = std::string(view.name) == "topk_ids";
    std::vector<DType> wrong = {DType::kF16, DType::kF64, DType::kI16, DType::kU8};
    if (is_id) wrong = {DType::kI16, DType::kU32, DType::kU64, DType::kF32, DType::kBF16};
    if (std::string(view.name) != "topk_scores" && std::string(view.name).find("bias") != 0 &&
        !is_id) {
      wrong.push_back(DType::kF32);
    }
    for (const DType dtype : wrong) {
      const std::string legal = is_id ? "int32 or int64" : "bf16";
      misuses.push_back({std::string(view.name) + " as " + to_string(dtype),
                         [of = view.of, dtype](Arguments& a) { of(a)->dtype = dtype; },
                         {view.name, to_string(dtype), legal}});
    }
  }
  expect_all_refused(GetParam(), misuses);
}

TEST_P(MisuseLaws, OtherShapesAreRefusedWithBothShapes) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    misuses.push_back({std::string(view.name) + " one longer in its last dimension",
                       [of = view.of](Arguments& a) {
                         TensorView& t = *of(a);
                         ++t.shape[static_cast<std::size_t>(t.rank - 1)];
                       },
                       {view.name, "shape"}});
    misuses.push_back({std::string(view.name) + " one dimension less",
                       [of = view.of](Arguments& a) { --of(a)->rank; },
                       {view.name, "shape"}});
    if (std::string(view.name).find("bias") == 0 || std::string(view.name) == "x") continue;
    misuses.push_back({std::string(view.name) + " one longer in its first dimension",
                       [of = view.of](Arguments& a) { ++of(a)->shape[0]; },
                       {view.name, "shape"}});
    misuses.push_back({std::string(view.name) + " not given",
                       [of = view.of](Arguments& a) { *of(a) = TensorView{}; },
                       {view.name, "shape", "got nothing"}});
  }
  const std::int64_t d = shape_.hidden_dim;
  const std::int64_t f = shape_.intermediate_dim;
  misuses.push_back({"x without a column",
                     [](Arguments& a) { --a.packed.input.x_TD.shape[1]; },
                     {"x must have shape [T" + extents({d}), "[4" + extents({d - 1})}});
  misuses.push_back({"w13 with F rows",
                     [f](Arguments& a) { a.packed.weights.w13_L2FD.shape[1] = f; },
                     {"w13 must have shape", extents({2 * f, d}), extents({f, d})}});
  misuses.push_back({"w2 transposed",
                     [d](Arguments& a) {
                       TensorView& w2 = a.packed.weights.w2_LDF;
                       std::swap(w2.shape[1], w2.shape[2]);
                       w2.strides[1] = d;
                     },
                     {"w2 must have shape", extents({d, f}), extents({f, d})}});
  // reports: A51, scores of K = 1 lose no dimension; here the ids do.
  misuses.push_back({"ids as one list",
                     [this](Arguments& a) {
                       a.packed.input.topk_ids_TK.rank = 1;
                       a.packed.input.topk_ids_TK.shape[0] = 4 * shape_.top_k;
                     },
                     {"topk_ids must have shape [4, 3]", "[12]"}});
  expect_all_refused(GetParam(), misuses);
}

TEST_P(MisuseLaws, RanksThatNoViewHasAreRefused) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    for (const int rank : {-1, 5, 1'000'000}) {
      misuses.push_back({std::string(view.name) + " of rank " + std::to_string(rank),
                         [of = view.of, rank](Arguments& a) { of(a)->rank = rank; },
                         {view.name, "shape", "of rank " + std::to_string(rank)}});
    }
  }
  expect_all_refused(GetParam(), misuses);
}

// reports: A33, A35, A37: what isn't honoured is refused with the stride.
TEST_P(MisuseLaws, StridesThatAreNotHonouredAreNamed) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    const std::string name = view.name;
    if (name.find("topk") == 0 || name.find("bias") == 0) continue;  // any stride is honoured
    misuses.push_back({name + " with stride 2 in its last dimension",
                       [of = view.of](Arguments& a) {
                         TensorView& t = *of(a);
                         t.strides[static_cast<std::size_t>(t.rank - 1)] = 2;
                       },
                       {name, "stride", ", 2]"}});
  }
  const std::int64_t d = shape_.hidden_dim;
  const std::int64_t f = shape_.intermediate_dim;
  for (const std::int64_t stride : {std::int64_t{0}, d - contract_.row_step}) {
    const std::string strides = extents({stride, 1});
    misuses.push_back({"y with overlapping rows",
                       [stride](Arguments& a) { a.y.strides[0] = stride; },
                       {"rows of y overlap", "strides [" + strides.substr(2)}});
    misuses.push_back({"w13 with overlapping rows",
                       [stride](Arguments& a) { a.packed.weights.w13_L2FD.strides[1] = stride; },
                       {"rows of w13", "at least " + std::to_string(d), strides}});
  }
  const std::int64_t stride = f - contract_.row_step;
  misuses.push_back({"w2 with overlapping rows",
                     [stride](Arguments& a) { a.packed.weights.w2_LDF.strides[1] = stride; },
                     {"rows of w2", "at least " + std::to_string(f), extents({stride, 1})}});
  expect_all_refused(GetParam(), misuses);
}

TEST_P(MisuseLaws, OtherDevicesAreNamed) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    misuses.push_back({std::string(view.name) + " on another GPU",
                       [of = view.of](Arguments& a) {
                         of(a)->device = {DeviceType::kCuda, 99};
                       },
                       {view.name, "cuda:99", contract_.memory}});
  }
  expect_all_refused(GetParam(), misuses);
}

TEST_P(MisuseLaws, NullPointersAreRefusedWhereThereAreElements) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    misuses.push_back({std::string(view.name) + " null",
                       [of = view.of](Arguments& a) { of(a)->data = nullptr; },
                       {view.name, "null"}});
  }
  expect_all_refused(GetParam(), misuses);
}

/// Half an element off: reading it would be undefined. (reports: A38: one element off is fine, see
/// StridesAndAlignment.)
TEST_P(MisuseLaws, PointersBetweenElementsAreRefused) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    misuses.push_back(
        {std::string(view.name) + " one byte off",
         [of = view.of](Arguments& a) { of(a)->data = static_cast<std::byte*>(of(a)->data) + 1; },
         {view.name, "aligned"}});
  }
  expect_all_refused(GetParam(), misuses);
}

TEST_P(MisuseLaws, AnOutputOverAnInputIsRefusedWithTheBytesOfBoth) {
  std::vector<Misuse> misuses;
  for (const NamedView& view : kViews) {
    if (std::string(view.name) == "y") continue;
    // In the place of x it is legal: one row on.
    const std::int64_t offset = std::string(view.name) == "x" ? 1 : 0;
    misuses.push_back({std::string("y over ") + view.name,
                       [of = view.of, offset](Arguments& a) {
                         a.y.data = static_cast<BF16*>(of(a)->data) + offset * of(a)->strides[0];
                       },
                       {std::string("y and ") + view.name + " overlap in memory: bytes [0x"}});
  }
  expect_all_refused(GetParam(), misuses);
}

// reports: A99, A102: both numbers, and the context stays usable.
TEST_P(MisuseLaws, MoreTokensThanPlannedAreRefusedWithBothNumbers) {
  expect_all_refused(GetParam(), {{"five tokens where four are planned",
                                   [](Arguments& a) {
                                     a.packed.input.x_TD.shape[0] = 5;
                                     a.packed.input.topk_ids_TK.shape[0] = 5;
                                     a.packed.input.topk_scores_TK.shape[0] = 5;
                                     a.y.shape[0] = 5;
                                   },
                                   {"T=5", "max_tokens=4"}}});
}

// reports: A26, A31: ids beyond 32 bits are not truncated.
TEST_P(MisuseLaws, IdsOutOfRangeAreNamedWithTheirPlace) {
  std::vector<Misuse> misuses;
  std::int64_t place = 0;
  for (const DType dtype : {DType::kI32, DType::kI64}) {
    std::vector<std::int64_t> wrong = {8,
                                       9,
                                       1000000,
                                       std::numeric_limits<std::int32_t>::max(),
                                       -2,
                                       -999999,
                                       std::numeric_limits<std::int32_t>::min()};
    if (dtype == DType::kI64) {
      for (const std::int64_t beyond :
           {std::int64_t{1} << 31, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 3,
            -(std::int64_t{1} << 32), std::numeric_limits<std::int64_t>::max(),
            std::numeric_limits<std::int64_t>::min()}) {
        wrong.push_back(beyond);
      }
    }
    for (const std::int64_t id : wrong) {
      const std::int64_t token = place % 4;
      const std::int64_t k = place++ % shape_.top_k;
      misuses.push_back({"id " + std::to_string(id),
                         [=](Arguments& a) { a.set_id(token, k, id); },
                         {"topk_ids[" + std::to_string(token) + ", " + std::to_string(k) + "]",
                          " is " + std::to_string(id) + ";", "0 to 7", "-1"},
                         {.id_dtype = dtype},
                         true});
    }
  }
  expect_all_refused(GetParam(), misuses);
}

}  // namespace
}  // namespace distmoe::conformance
