// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every element of the rows stands once, where the order says, and everything else up to
// the ends of the last blocks is zero.
#include "backend/cpu/packed_columns.hpp"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/checked_math.hpp"
#include "layout/cpu_workspace.hpp"

namespace distmoe::cpu {
namespace {

void expect_order(std::int64_t num_rows, std::int64_t num_columns, std::int64_t stride,
                  bool has_second, std::int64_t block) {
  const auto matrix = [&](std::uint16_t first) {
    std::vector<BF16> values(static_cast<std::size_t>(num_rows * stride), BF16{0x7FC0});
    for (std::int64_t row = 0; row < num_rows; ++row) {
      for (std::int64_t column = 0; column < num_columns; ++column) {
        values[static_cast<std::size_t>(row * stride + column)].bits =
            static_cast<std::uint16_t>(first + row * num_columns + column);
      }
    }
    return values;
  };
  const std::vector<BF16> first = matrix(1);
  const std::vector<BF16> second = matrix(20000);
  const DepthRows rows{.first = first.data(),
                       .second = has_second ? second.data() : nullptr,
                       .num_rows = num_rows,
                       .num_columns = num_columns,
                       .row_stride = stride};
  const std::int64_t depth = ceil_div(rows.depth(), kCpuPackedDepth) * kCpuPackedDepth;
  const std::int64_t columns = ceil_div(num_columns, block) * block;
  constexpr std::uint16_t kUntouched = 0xABCD;
  std::vector<BF16> packed(static_cast<std::size_t>(depth * columns) + 7, BF16{kUntouched});
  pack_columns(rows, block, packed.data());
  for (std::int64_t k = 0; k < depth; ++k) {
    for (std::int64_t n = 0; n < columns; ++n) {
      const std::int64_t at = n / block * depth * block +
                              k / kCpuPackedDepth * kCpuPackedDepth * block +
                              k % kCpuPackedDepth / 2 * 2 * block + n % block * 2 + k % 2;
      const bool is_there = k < rows.depth() && n < num_columns;
      ASSERT_EQ(packed[static_cast<std::size_t>(at)].bits, is_there ? rows.row(k)[n].bits : 0)
          << "row " << k << ", column " << n;
    }
  }
  for (std::size_t i = static_cast<std::size_t>(depth * columns); i < packed.size(); ++i) {
    ASSERT_EQ(packed[i].bits, kUntouched);
  }
}

TEST(PackedColumns, AlternatePairsOfRowsInBlocksOfColumns) {
  for (const std::int64_t block : {16, 32, 48, 64}) {
    for (const std::int64_t num_columns : {1, 15, 16, 17, 63, 64, 65, 100, 240}) {
      for (const std::int64_t num_rows : {1, 2, 31, 32, 33, 70}) {
        expect_order(num_rows, num_columns, num_columns, false, block);
        expect_order(num_rows, num_columns, num_columns + 3, true, block);
      }
    }
  }
}

TEST(PackedColumns, PairsOfRowsAreFilledUpToAWidth) {
  for (const std::int64_t num_rows : {1, 2, 3, 8}) {
    for (const auto& [num_columns, width] :
         {std::pair(1, 4), std::pair(33, 64), std::pair(64, 64)}) {
      std::vector<BF16> values(static_cast<std::size_t>(num_rows * (num_columns + 3)));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i].bits = static_cast<std::uint16_t>(i + 1);
      }
      const DepthRows rows{.first = values.data(),
                           .num_rows = num_rows,
                           .num_columns = num_columns,
                           .row_stride = num_columns + 3};
      const std::int64_t depth = ceil_div(num_rows, 2) * 2;
      constexpr std::uint16_t kUntouched = 0xABCD;
      std::vector<BF16> packed(static_cast<std::size_t>(depth * width) + 7, BF16{kUntouched});
      pack_row_pairs(rows, width, packed.data());
      for (std::int64_t k = 0; k < depth; ++k) {
        for (std::int64_t n = 0; n < width; ++n) {
          const bool is_there = k < num_rows && n < num_columns;
          ASSERT_EQ(packed[static_cast<std::size_t>((k / 2 * width + n) * 2 + k % 2)].bits,
                    is_there ? rows.row(k)[n].bits : 0)
              << "row " << k << ", column " << n;
        }
      }
      EXPECT_EQ(packed[static_cast<std::size_t>(depth * width)].bits, kUntouched);
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
