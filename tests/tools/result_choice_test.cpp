// SPDX-License-Identifier: Apache-2.0
// Invariant: of every call on every machine one result counts, the newest, and nothing is made of
// the times of a wrong one.
#include "results/result_choice.hpp"

#include <gtest/gtest.h>

namespace distmoe::tools {
namespace {

ResultRow row_of(const char* date, double us) {
  ResultRow row;
  row.shape = "A";
  row.mode = "forward";
  row.precision = "bf16";
  row.combine = "per_route";
  row.routing = "uniform";
  row.engine = "threads";
  row.machine = "one";
  row.tokens = 64;
  row.date = date;
  row.median_us = us;
  row.rel_l2 = 0.003;
  row.tolerance = 0.008;
  return row;
}

TEST(ResultChoice, TheNewestOfACallCounts) {
  const std::vector<ResultRow> rows = {row_of("2026-12-01T01:00:00Z", 1),
                                       row_of("2026-12-01T03:00:00Z", 2),
                                       row_of("2026-12-01T02:00:00Z", 3)};
  const ResultChoice choice = choose_results(rows);
  ASSERT_EQ(choice.shown.size(), 1U);
  EXPECT_EQ(choice.shown[0]->median_us, 2);
  ASSERT_EQ(choice.again.size(), 1U);
  EXPECT_EQ(choice.again[0],
            "A, forward, T = 64: that of 2026-12-01T03:00:00Z counts, not 2026-12-01T01:00:00Z, "
            "2026-12-01T02:00:00Z");
  // Of one date the last.
  const std::vector<ResultRow> equal = {row_of("2026", 1), row_of("2026", 2)};
  EXPECT_EQ(choose_results(equal).shown.at(0)->median_us, 2);
}

TEST(ResultChoice, CallsThatDifferInAnythingAllCount) {
  using Change = void (*)(ResultRow & row);
  constexpr Change kChanges[] = {
      [](ResultRow& row) { row.machine = "two"; }, [](ResultRow& row) { row.shape = "B"; },
      [](ResultRow& row) { row.tokens = 65; },     [](ResultRow& row) { row.ranks = 2; },
      [](ResultRow& row) { row.engine = "mpi"; },  [](ResultRow& row) { row.is_graph = true; },
      [](ResultRow& row) { row.backend = "cuda"; }};
  for (const Change change : kChanges) {
    std::vector<ResultRow> rows = {row_of("2026", 1), row_of("2026", 2)};
    change(rows[1]);
    const ResultChoice choice = choose_results(rows);
    EXPECT_EQ(choice.shown.size(), 2U);
    EXPECT_TRUE(choice.again.empty());
  }
}

TEST(ResultChoice, WhatIsOutsideItsToleranceOrDoesNotRepeatIsWrong) {
  ResultRow row = row_of("2026", 1);
  EXPECT_EQ(right_of({&row}).size(), 1U);
  row.rel_l2 = 0.0081;
  EXPECT_TRUE(right_of({&row}).empty());
  row.rel_l2.reset();
  EXPECT_TRUE(right_of({&row}).empty());
  row.rel_l2 = 0.003;
  row.is_repeatable = false;
  EXPECT_TRUE(right_of({&row}).empty());
}

TEST(ResultGroups, ThinnedRowsAreSpreadEvenly) {
  const std::vector<ResultRow> rows(10);
  ResultGroup all;
  for (const ResultRow& row : rows) all.push_back(&row);
  EXPECT_EQ(thinned(all, 10), all);
  EXPECT_EQ(thinned(all, 3), (ResultGroup{all[0], all[3], all[6]}));
}

}  // namespace
}  // namespace distmoe::tools
