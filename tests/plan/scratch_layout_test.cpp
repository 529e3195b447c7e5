// SPDX-License-Identifier: Apache-2.0
//
// Invariant: regions of a call are aligned, disjoint (except the overlays that are named), end
// where they are to end, and take at most the plan's bytes for every number of rows up to the
// plan's.
#include "plan/scratch_layout.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "plan/plan_testing.hpp"

namespace distmoe {
namespace {

struct Region {
  std::string name;
  std::int64_t begin;
  std::int64_t bytes;
};

std::int64_t dense(std::int64_t rows, std::int64_t width) { return align_up(2 * rows * width); }

/// `regions` lie in [begin, end), each aligned and none inside another.
void expect_disjoint(std::vector<Region> regions, std::int64_t begin, std::int64_t end) {
  std::ranges::sort(regions, {}, &Region::begin);
  std::int64_t free_from = begin;
  for (const Region& region : regions) {
    EXPECT_EQ(region.begin % 128, 0) << region.name;
    EXPECT_GE(region.begin, free_from) << region.name << " overlaps";
    free_from = region.begin + region.bytes;
  }
  EXPECT_LE(free_from, end);
}

LayerDims random_shape(std::mt19937_64& random) {
  const auto pick = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  LayerDims shape;
  shape.top_k = pick(1, 6);
  shape.inference = pick(0, 2) == 0;
  shape.pipeline = pick(0, 1) ? Pipeline::kMega : Pipeline::kStaged;
  std::int64_t multiple = 1;
  if (pick(0, 1)) {
    shape.precision = shape.inference && pick(0, 1) ? Precision::kNVFP4 : Precision::kMXFP8;
    multiple = 32;
  } else if (!shape.inference && pick(0, 2) == 0) {
    shape.activation_policy = ActivationPolicy::kLean;
  }
  shape.hidden_dim = multiple * pick(1, 40);
  shape.intermediate_dim = multiple * pick(1, 40);
  if (pick(0, 2) == 0) shape.intermediate_dim = shape.hidden_dim;
  return shape;
}

std::vector<Region> scratch_regions_of(const LayerDims& shape, std::int64_t rows,
                                       const RegionOffsets& at) {
  const LayerRegions sizes = LayerBytes<>{shape}.scratch_regions(rows);
  std::vector<Region> regions = {{"h1", at.h1, sizes.h1}};
  if (is_block_scaled(shape.precision)) {
    regions.push_back({"quantised rows", at.quantised_rows, sizes.quantised_rows});
    if (shape.inference) return regions;
    regions.push_back({"x", at.x, sizes.x});
    regions.push_back({"h2", at.h2, sizes.h2});
    regions.push_back({"grad_h1", at.grad_h1, sizes.grad_h1});
    regions.push_back({"grad_h2", at.grad_h2, sizes.grad_h2});
    regions.push_back({"grad_h3", at.grad_h3, sizes.grad_h3});
    return regions;
  }
  regions.push_back({"x", at.x, sizes.x});
  regions.push_back({"h2", at.h2, dense(rows, shape.intermediate_dim)});
  if (shape.inference) return regions;
  regions.push_back({"grad_h2", at.grad_h2, sizes.grad_h2});
  regions.push_back({"grad_h3", at.grad_h3, dense(rows, shape.hidden_dim)});
  return regions;
}

TEST(ScratchLayout, RegionsAreDisjointAndWithinThePlanForAnyRows) {  // reports: A102
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000 && !testing::Test::HasFailure(); ++i) {
    const LayerDims shape = random_shape(random);
    const std::int64_t padding = is_block_scaled(shape.precision) ? 128 : 1;
    const std::int64_t plan_rows = padding * std::uniform_int_distribution<>(0, 300)(random);
    const std::int64_t rows =
        padding * std::uniform_int_distribution<std::int64_t>(0, plan_rows / padding)(random);
    SCOPED_TRACE("D=" + std::to_string(shape.hidden_dim) +
                 " F=" + std::to_string(shape.intermediate_dim) + " rows=" + std::to_string(rows) +
                 " of " + std::to_string(plan_rows));
    const std::int64_t planned = LayerBytes<>{shape}.scratch(plan_rows);
    const std::int64_t end = planned + 128 * 1000;
    const RegionOffsets at = scratch_layout(shape, rows, end);
    EXPECT_LE(at.bytes, planned);
    EXPECT_LE(at.bytes, LayerBytes<>{shape}.scratch(rows));
    expect_disjoint(scratch_regions_of(shape, rows, at), end - at.bytes, end);
    if (!shape.inference && !is_block_scaled(shape.precision)) {
      // grad_h1 covers h2 and lies in the carved bytes, clear of grad_h2, x and h1.
      expect_disjoint({{"grad_h1", at.grad_h1, dense(rows, 2 * shape.intermediate_dim)},
                       {"grad_h2", at.grad_h2, dense(rows, shape.intermediate_dim)},
                       {"x", at.x, dense(rows, shape.hidden_dim)},
                       {"h1", at.h1, dense(rows, 2 * shape.intermediate_dim)}},
                      end - at.bytes, end);
    }
  }
}

TEST(ScratchLayout, FewerRowsThanPlannedNeverNeedMoreThanThePlan) {
  LayerDims shape;
  shape.hidden_dim = 1;
  shape.intermediate_dim = 1;
  shape.top_k = 1;
  const std::int64_t planned = LayerBytes<>{shape}.scratch(192);
  EXPECT_GT(LayerBytes<>{shape}.scratch(160), planned);  // the formula alone would not fit
  EXPECT_LE(scratch_layout(shape, 160, 1 << 20).bytes, planned);
}

TEST(ScratchLayout, GrowsDownFromTheEnd) {
  LayerDims shape;
  shape.hidden_dim = 64;
  shape.intermediate_dim = 192;
  shape.top_k = 2;
  const RegionOffsets at = scratch_layout(shape, 10, 1000000 * 128);
  EXPECT_EQ(at.x, 1000000 * 128 - 10 * 64 * 2);
  EXPECT_EQ(at.h1, at.x - 10 * 384 * 2);
  EXPECT_EQ(at.h2, at.grad_h1);
  EXPECT_EQ(at.grad_h3, at.h2 + 10 * 192 * 2);
  EXPECT_EQ(at.bytes, LayerBytes<>{shape}.scratch(10));
}

TEST(SavedLayout, RegionsAreDisjointAndAddUpToTheSavedBytes) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 5000 && !testing::Test::HasFailure(); ++i) {
    const LayerDims shape = random_shape(random);
    const std::int64_t tokens = std::uniform_int_distribution<>(0, 200)(random);
    const std::int64_t rows = 128 * std::uniform_int_distribution<>(0, 9)(random);
    const LayerBytes<> layer{shape};
    const RegionOffsets at = saved_layout(shape, tokens, rows, 12800);
    EXPECT_EQ(at.bytes, layer.saved(tokens, rows));
    if (shape.inference) continue;
    const LayerRegions sizes = layer.saved_regions(tokens, rows);
    std::vector<Region> regions = {{"x", at.x, sizes.x}, {"h1", at.h1, sizes.h1}};
    if (at.h2 != kNoRegion) regions.push_back({"h2", at.h2, sizes.h2});
    if (at.h3 != kNoRegion) regions.push_back({"h3", at.h3, sizes.h3});
    EXPECT_EQ(at.x, 12800);
    EXPECT_EQ(at.h3 == kNoRegion, shape.activation_policy == ActivationPolicy::kLean);
    expect_disjoint(regions, 12800, 12800 + at.bytes);
  }
}

TEST(ScratchLayout, OffsetsBeyondFourGiBAreExact) {  // reports: A77, A78
  LayerDims shape;
  shape.hidden_dim = 7168;
  shape.intermediate_dim = 2048;
  shape.top_k = 8;
  const std::int64_t end = std::int64_t{1} << 42;
  const RegionOffsets at = scratch_layout(shape, 299594 * 8, end);
  EXPECT_EQ(end - at.x, 299594LL * 8 * 7168 * 2);
  EXPECT_EQ(at.x - at.h1, 299594LL * 8 * 4096 * 2);
}

}  // namespace
}  // namespace distmoe
