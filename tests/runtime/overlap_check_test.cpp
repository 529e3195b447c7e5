// SPDX-License-Identifier: Apache-2.0
//
// Invariant: two tensors are refused exactly where one is written and they share an element's
// bytes, as counted byte by byte.
#include "runtime/overlap_check.hpp"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "distmoe/error.hpp"

namespace distmoe {
namespace {

/// What check_apart says; empty where it accepts.
std::string refusal(const TensorView& a, const TensorView& b, Access of_a = Access::kWritten,
                    Access of_b = Access::kRead) {
  try {
    check_apart({{"a", &a, of_a}, {"b", &b, of_b}});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return {};
}

std::set<const std::byte*> bytes_of(const TensorView& tensor) {
  std::set<const std::byte*> bytes;
  const auto element = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (std::int64_t j = 0; j < tensor.shape[1]; ++j) {
      const auto* at = static_cast<const std::byte*>(tensor.data) +
                       (i * tensor.strides[0] + j * tensor.strides[1]) * element;
      for (std::int64_t byte = 0; byte < element; ++byte) bytes.insert(at + byte);
    }
  }
  return bytes;
}

TEST(OverlapCheck, IsThatOfTheBytes) {
  alignas(8) std::array<std::byte, 512> memory{};
  std::vector<TensorView> views;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int begin : {128, 136, 192, 260}) {
      for (const std::array<std::int64_t, 2> strides :
           {std::array<std::int64_t, 2>{3, 1}, {8, 1}, {-8, 1}, {16, 1}, {0, 1}, {1, 5}, {8, 2}}) {
        TensorView view(memory.data() + begin, dtype, {4, 3});
        view.strides[0] = strides[0];
        view.strides[1] = strides[1];
        views.push_back(view);
      }
    }
  }
  int num_apart = 0;
  for (const TensorView& a : views) {
    const std::set<const std::byte*> bytes = bytes_of(a);
    for (const TensorView& b : views) {
      bool is_shared = false;
      for (const std::byte* byte : bytes_of(b)) is_shared = is_shared || bytes.contains(byte);
      num_apart += is_shared ? 0 : 1;
      EXPECT_EQ(refusal(a, b).starts_with("a and b overlap in memory: bytes ["), is_shared)
          << a.describe() << " at " << a.data << ", " << b.describe() << " at " << b.data;
    }
  }
  EXPECT_GT(num_apart, 100);
}

TEST(OverlapCheck, NamesTheBytesFromTheFirstToTheLast) {
  std::array<float, 16> memory{};
  const TensorView front(memory.data(), DType::kF32, {8});
  TensorView backwards(memory.data() + 11, DType::kF32, {3});
  backwards.strides[0] = -4;
  const auto at = [&](int element) { return static_cast<const void*>(memory.data() + element); };
  std::ostringstream expected;
  expected << "a and b overlap in memory: bytes [" << at(0) << ", " << at(8) << ") and [" << at(3)
           << ", " << at(12) << ")";
  EXPECT_EQ(refusal(front, backwards), expected.str());
}

TEST(OverlapCheck, IgnoresWhatIsOnlyReadEmptyOrNotGiven) {
  std::array<float, 8> memory{};
  const TensorView all(memory.data(), DType::kF32, {8});
  const TensorView none(memory.data(), DType::kF32, {0});
  EXPECT_EQ(refusal(all, all, Access::kRead, Access::kRead), "");
  EXPECT_NE(refusal(all, all, Access::kRead, Access::kWritten), "");
  EXPECT_NE(refusal(all, all, Access::kWritten, Access::kWritten), "");
  EXPECT_EQ(refusal(all, none), "");
  EXPECT_EQ(refusal(all, TensorView{}), "");
}

}  // namespace
}  // namespace distmoe
