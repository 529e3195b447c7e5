// SPDX-License-Identifier: Apache-2.0
//
// Invariant: codes, factors and scales of a row lie where the plan's formulas say, beyond 2^32
// bytes too, and are written and read there.
#include <gtest/gtest.h>

#include <vector>

#include "backend/cpu/coded_rows.hpp"
#include "conformance/moe_problem.hpp"
#include "core/checked_math.hpp"
#include "formats/sparse_memory.hpp"

namespace distmoe::cpu {
namespace {

using testing::SparseMemory;

constexpr std::int64_t kWidth = 7168;
/// Rows that a slot of a large call may have; the last begin beyond 2^32 codes, of 4 bits too.
constexpr std::int64_t kRows = 1310720;
static_assert((kRows - 128) * kWidth / 2 > std::int64_t{1} << 32);

std::vector<BF16> values_of(std::int64_t rows) {
  std::vector<BF16> values;
  for (std::int64_t i = 0; i < rows * kWidth; ++i) {
    values.push_back(to_bf16(conformance::uniform(41, static_cast<std::uint64_t>(i))));
  }
  return values;
}

std::int64_t distance(const void* from, const void* to) {
  return static_cast<const std::byte*>(to) - static_cast<const std::byte*>(from);
}

// reports: A77, A78: what gathers, quantises and multiplies rows finds them by these.
TEST(CodedAddresses, OfRowsBeyond32BitsLieWhereThePlanSays) {
  const SparseMemory memory(std::size_t{16} << 30);
  if (!memory.is_given()) GTEST_SKIP() << "this machine gives no 16 GiB of address space";
  const std::vector<BF16> values = values_of(1);
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4}) {
    const bool is_nvfp4 = precision == Precision::kNVFP4;
    const std::int64_t code_bytes = is_nvfp4 ? kWidth / 2 : kWidth;
    const std::int64_t scale_bytes = is_nvfp4 ? kWidth / 16 : kWidth / 32;
    const std::int64_t behind_codes = align_up(kRows * code_bytes);
    const std::int64_t behind_factors = behind_codes + (is_nvfp4 ? 4 * kRows : 0);
    const CodedRows rows(precision, memory.base(), kRows, kWidth);
    for (const std::int64_t row : {std::int64_t{0}, std::int64_t{299594}, kRows - 1}) {
      EXPECT_EQ(distance(memory.base(), rows.codes(row)), row * code_bytes);
      EXPECT_EQ(distance(memory.base(), rows.scales(row)), behind_factors + row * scale_bytes);
    }
    rows.encode({values.data(), 1, kWidth, kWidth}, kRows - 1);
    std::vector<BF16> decoded(kWidth);
    rows.decode(kRows - 1, 1, decoded.data());
    // The same row where nothing is far.
    std::vector<std::byte> own(static_cast<std::size_t>(4 * kWidth));
    const CodedRows near(precision, own.data(), 1, kWidth);
    near.encode({values.data(), 1, kWidth, kWidth}, 0);
    std::vector<BF16> expected(kWidth);
    near.decode(0, 1, expected.data());
    for (std::size_t i = 0; i < decoded.size(); ++i) ASSERT_EQ(decoded[i].bits, expected[i].bits);
    EXPECT_EQ(rows.result_factor(kRows - 1), near.result_factor(0));
    EXPECT_NE(decoded[5].bits, 0);
  }
}

TEST(CodedAddresses, OfColumnsBeyond32BitsLieWhereThePlanSays) {
  const SparseMemory memory(std::size_t{16} << 30);
  if (!memory.is_given()) GTEST_SKIP() << "this machine gives no 16 GiB of address space";
  constexpr std::int64_t kFirst = kRows - 128;
  const std::vector<BF16> values = values_of(33);
  const CodedColumns columns(memory.base(), kRows, kWidth);
  columns.encode({values.data(), 33, kWidth, kWidth, 95}, kFirst);
  const std::byte* codes = memory.base() + kFirst * kWidth;
  const std::byte* scales = memory.base() + align_up(kRows * kWidth) + kFirst / 32 * kWidth;
  std::vector<std::byte> own(static_cast<std::size_t>(128 * kWidth + 4 * kWidth));
  const CodedColumns near(own.data(), 128, kWidth);
  near.encode({values.data(), 33, kWidth, kWidth, 95}, 0);
  EXPECT_TRUE(std::equal(own.begin(), own.begin() + 128 * kWidth, codes));
  EXPECT_TRUE(std::equal(own.begin() + 128 * kWidth, own.end(), scales));
  std::vector<BF16> decoded(33 * 32);
  std::vector<BF16> expected(33 * 32);
  columns.decode({0, kFirst, kFirst + 33}, 7136, 32, decoded.data());
  near.decode({0, 0, 33}, 7136, 32, expected.data());
  for (std::size_t i = 0; i < decoded.size(); ++i) ASSERT_EQ(decoded[i].bits, expected[i].bits);
  EXPECT_NE(decoded.back().bits, 0);
}

}  // namespace
}  // namespace distmoe::cpu
