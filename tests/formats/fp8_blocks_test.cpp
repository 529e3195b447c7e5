// SPDX-License-Identifier: Apache-2.0
//
// Invariant: element (r, c) of a block-scaled FP8 matrix is code * scale[r / 128][c / 128], rounded
// once to BF16, with partial blocks at both edges.
#include "formats/fp8_blocks.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace distmoe {
namespace {

std::vector<BF16> decode(const std::vector<E4M3>& codes, const std::vector<float>& scales,
                         std::int64_t rows, std::int64_t cols) {
  std::vector<BF16> out(static_cast<std::size_t>(rows * cols), BF16{0x7FC0});
  decode_fp8_blocks(codes.data(), scales.data(), rows, cols, out.data());
  return out;
}

// reports: A44
TEST(Fp8Blocks, GivesThePartialBlocksOf192RowsTheirOwnScales) {
  constexpr std::int64_t kRows = 192;
  const std::vector<E4M3> ones(kRows, to_e4m3(1.0f));
  const std::vector<BF16> gate = decode(ones, {1.0f, 2.0f}, kRows, 1);
  const std::vector<BF16> up = decode(ones, {4.0f, 8.0f}, kRows, 1);
  for (std::size_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(to_float(gate[row]), row < 128 ? 1.0f : 2.0f) << row;
    EXPECT_EQ(to_float(up[row]), row < 128 ? 4.0f : 8.0f) << row;
  }
}

TEST(Fp8Blocks, MatchesTheDefinitionElementByElement) {
  constexpr std::int64_t kRows = 130;
  constexpr std::int64_t kCols = 259;
  const std::vector<float> scales = {0.3f, 1.7e-3f, -2.5f, 1e-30f, 7.1f, 0.0f};  // [2, 3]
  std::vector<E4M3> codes;
  codes.reserve(kRows * kCols);
  for (std::int64_t i = 0; i < kRows * kCols; ++i) {
    codes.push_back(E4M3{static_cast<std::uint8_t>(i * 37 % 253)});
  }
  const std::vector<BF16> out = decode(codes, scales, kRows, kCols);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t col = 0; col < kCols; ++col) {
      const auto i = static_cast<std::size_t>(row * kCols + col);
      const float scale = scales[static_cast<std::size_t>(row / 128 * 3 + col / 128)];
      const double product = static_cast<double>(to_float(codes[i])) * static_cast<double>(scale);
      const BF16 expected = to_bf16(product);
      if (std::isnan(product)) {
        ASSERT_TRUE(std::isnan(to_float(out[i])));
      } else {
        ASSERT_EQ(out[i].bits, expected.bits) << row << ' ' << col;
      }
    }
  }
}

// A product that lies 1 to 3 units of 2^-26 above a tie of BF16 is rounded up; FP32 in between
// would make a tie of it, and a tie between an even lower and an odd upper neighbour rounds down.
TEST(Fp8Blocks, RoundsTheProductOnceAndNotThroughFp32) {
  int num_cases = 0;
  for (std::int64_t tie = 257; tie < 512; tie += 4) {  // in units of 2^-8
    for (const std::int64_t eighths : {9, 11, 13, 15}) {
      for (std::int64_t excess = 1; excess <= 3; ++excess) {
        const std::int64_t product = (tie << 18) + excess;  // in units of 2^-26
        const std::int64_t significand = product / eighths;
        if (product % eighths != 0 || significand < (1 << 23)) continue;
        const float scale = std::ldexp(static_cast<float>(significand), -23);
        const E4M3 code = to_e4m3(static_cast<float>(eighths) / 8);
        const float upper = static_cast<float>(tie + 1) / 256;
        BF16 out{0x7FC0};
        decode_fp8_blocks(&code, &scale, 1, 1, &out);
        EXPECT_EQ(to_float(out), upper) << tie << ' ' << eighths << ' ' << excess;
        EXPECT_LT(to_float(to_bf16(to_float(code) * scale)), upper);
        ++num_cases;
      }
    }
  }
  EXPECT_GT(num_cases, 10);
}

}  // namespace
}  // namespace distmoe
