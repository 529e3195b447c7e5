// SPDX-License-Identifier: Apache-2.0
//
// Invariant: each precision has the bytes of codes, scales and factors of the numerics contract,
// partial bytes and blocks at the end of a row included.
#include "formats/block_format.hpp"

#include <gtest/gtest.h>

namespace distmoe {
namespace {

struct Row {
  Precision precision;
  std::int64_t elements, code_bytes, num_scales, factor_bytes;
};

TEST(BlockFormat, HasTheBytesOfTheContract) {
  for (const Row& row : {Row{Precision::kMXFP8, 96, 96, 3, 0},
                         {Precision::kMXFP8, 33, 33, 2, 0},
                         {Precision::kMXFP4, 96, 48, 3, 0},
                         {Precision::kMXFP4, 33, 17, 2, 0},
                         {Precision::kNVFP4, 96, 48, 6, 4},
                         {Precision::kNVFP4, 33, 17, 3, 4},
                         {Precision::kNVFP4, 1, 1, 1, 4},
                         {Precision::kMXFP8, 0, 0, 0, 0}}) {
    const BlockFormat format = block_format_of(row.precision);
    EXPECT_EQ(format.code_bytes(row.elements), row.code_bytes) << row.elements;
    EXPECT_EQ(format.num_scales(row.elements), row.num_scales) << row.elements;
    EXPECT_EQ(format.factor_bytes, row.factor_bytes) << row.elements;
    EXPECT_EQ(format.has_factors(), row.factor_bytes != 0) << row.elements;
  }
}

}  // namespace
}  // namespace distmoe
