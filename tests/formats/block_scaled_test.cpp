// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the amax of a matrix is the largest magnitude of its elements alone, and NaN where one
// of them is NaN.
#include "formats/block_scaled.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats/raw_values.hpp"

namespace distmoe {
namespace {

using testing::RawMatrix;
using testing::StridedRows;

float amax(const RawMatrix& matrix) { return amax_of(StridedRows(matrix, matrix.cols + 9).view()); }

TEST(Amax, IsTheLargestMagnitudeOfTheElementsAlone) {
  for (const std::int64_t cols : {1, 7, 16, 33, 250}) {
    const RawMatrix matrix = testing::finite_values(5, cols, static_cast<std::uint32_t>(cols));
    EXPECT_EQ(static_cast<double>(amax(matrix)), testing::oracle_amax(matrix, 0, 5, 0, cols));
  }
  EXPECT_EQ(amax_of({}), 0.0f);
}

// reports: A58
TEST(Amax, PropagatesNaNAndInfinityFromEveryPlace) {
  constexpr std::int64_t kCols = 67;
  for (std::size_t place = 0; place < 2 * kCols; ++place) {
    RawMatrix matrix = testing::finite_values(2, kCols, 3);
    matrix.bits[place] = 0xFF80;
    ASSERT_EQ(amax(matrix), std::numeric_limits<float>::infinity()) << place;
    matrix.bits[place] = 0xFFC1;
    matrix.bits[(place + 1) % matrix.bits.size()] = 0x7F80;
    ASSERT_TRUE(std::isnan(amax(matrix))) << place;
  }
}

TEST(ScaleBytes, AreFoundFromEveryPlace) {
  for (const std::int64_t count : {1, 3, 64, 200}) {
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(count), 126);
    EXPECT_EQ(find_scale_above(scales.data(), count, 126), count);
    EXPECT_EQ(find_scale_above(scales.data(), count, 125), 0);
    for (std::int64_t place = count - 1; place >= 0; --place) {
      scales[static_cast<std::size_t>(place)] = 255;
      ASSERT_EQ(find_scale_above(scales.data(), count, 254), place);
      ASSERT_EQ(find_scale_above(scales.data(), place, 254), place)
          << "what lies behind is not read";
    }
  }
  EXPECT_EQ(find_scale_above(nullptr, 0, 0), 0);
}

}  // namespace
}  // namespace distmoe
