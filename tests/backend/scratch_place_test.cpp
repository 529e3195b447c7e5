// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the scratch of a call on a GPU, of any number of rows, is disjoint, aligned and within
// what the plan has for as many rows or more.
#include "backend/cuda/scratch_place.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace distmoe::cuda {
namespace {

constexpr std::uint64_t kEnd = std::uint64_t{1} << 40;

struct Region {
  std::uint64_t begin;
  std::int64_t bytes;
};

/// Those that a call of this kind has, as rows without gaps.
std::vector<Region> regions_of(const ScratchLimits& limits, std::int64_t rows) {
  const ScratchPlace place = place_scratch(limits, rows);
  const std::int64_t f = limits.intermediate_dim;
  std::vector<Region> regions = {{place.h2, rows * f * 2},
                                 {place.hidden_rows, rows * limits.hidden_dim * 2},
                                 {place.h1, rows * f * 4}};
  if (limits.is_inference) {
    EXPECT_EQ(place.x, 0);
    EXPECT_EQ(place.scores, 0);
    return regions;
  }
  regions.push_back({place.x, rows * limits.hidden_dim * 2});
  if (limits.is_lean) {
    regions.push_back({place.scores, rows * 4 * (1 + (f + 127) / 128)});
  } else {
    EXPECT_EQ(place.scores, 0);
  }
  return regions;
}

void expect_fits(const ScratchLimits& limits, std::int64_t rows) {
  std::vector<Region> regions = regions_of(limits, rows);
  std::ranges::sort(regions, {}, &Region::begin);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    EXPECT_EQ(regions[i].begin % 128, 0);
    const std::uint64_t next = i + 1 < regions.size() ? regions[i + 1].begin : kEnd;
    EXPECT_LE(regions[i].begin + static_cast<std::uint64_t>(regions[i].bytes), next);
  }
  const std::int64_t bytes = scratch_bytes(limits, rows);
  EXPECT_EQ(bytes, static_cast<std::int64_t>(kEnd - regions.front().begin));
  LayerDims dims{.hidden_dim = limits.hidden_dim, .intermediate_dim = limits.intermediate_dim};
  dims.inference = limits.is_inference;
  EXPECT_LE(bytes, LayerBytes<>{dims}.scratch(rows));
  EXPECT_LE(bytes, scratch_bytes(limits, rows + 1));
}

TEST(ScratchPlace, IsDisjointAndWithinThePlan) {
  std::mt19937 random(5);
  const auto dim = [&] { return 8 * (1 + static_cast<std::int64_t>(random() % 300)); };
  for (int i = 0; i < 2000 && !testing::Test::HasFailure(); ++i) {
    ScratchLimits limits{.hidden_dim = dim(), .intermediate_dim = dim(), .end = kEnd};
    if (i % 5 == 0) limits.intermediate_dim = 8;
    limits.is_inference = i % 3 == 0;
    limits.is_lean = !limits.is_inference && i % 2 == 0;
    SCOPED_TRACE(testing::Message() << limits.hidden_dim << " " << limits.intermediate_dim << " "
                                    << limits.is_inference << limits.is_lean);
    for (const std::int64_t rows : {0, 1, 2, 63, 160, 192, 5000}) expect_fits(limits, rows);
  }
}

TEST(ScratchPlace, KeepsWhatProductsReadMostOnTheDeviceLongest) {
  const ScratchLimits limits{.hidden_dim = 2048, .intermediate_dim = 768, .end = kEnd};
  const ScratchPlace place = place_scratch(limits, 1000);
  EXPECT_GT(place.h2, place.hidden_rows);
  EXPECT_GT(place.hidden_rows, place.h1);
  EXPECT_GT(place.h1, place.x);
  // A saved layer's backward needs no x: 1.5 times the rows fit.
  const std::int64_t device =
      LayerBytes<>{{.hidden_dim = 2048, .intermediate_dim = 768}}.scratch(1000);
  EXPECT_LE(static_cast<std::int64_t>(kEnd - place_scratch(limits, 1500).h1), device);
}

}  // namespace
}  // namespace distmoe::cuda
