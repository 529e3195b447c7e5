// SPDX-License-Identifier: Apache-2.0
// Invariant: the JSON report is one object with exactly the documented keys in their order; numbers
// are finite or null; medians follow their definition.
#include "report.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

RunReport sample() {
  RunReport report;
  report.checkpoint = "testdata/tiny";
  report.architecture = "TinyForCausalLM";
  report.layer = 3;
  report.ranks = 2;
  report.engine = "threads";
  report.backend = "cpu";
  report.precision = "bf16";
  report.tokens = 7;
  report.tokens_per_rank = {4, 3};
  report.rows_per_rank = {10, 4};
  report.rows_per_expert = {8, 2, 4};
  report.experts_per_rank = {2, 1};
  report.comparison = Comparison{0.0025, 0.99999, 0.125};
  report.tolerance = 8e-3;
  report.call_seconds = {0.5, 0.25, 4.0};
  report.planned_bytes = 4096;
  report.peak_bytes = 2048;
  return report;
}

TEST(RunReport, JsonHasTheDocumentedKeysInOrder) {
  std::vector<std::string> keys;
  const Json json = Json::parse(json_of(sample()));
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{
                      "checkpoint", "architecture", "layer", "ranks", "engine", "backend",
                      "combine", "precision", "tokens", "rows_per_rank", "experts_per_rank",
                      "imbalance", "rel_l2", "cosine", "max_abs", "seconds", "planned_bytes",
                      "peak_bytes", "repeat_bitwise_equal"}));
}

TEST(RunReport, JsonHasTheValuesOfTheRun) {
  const Json json = Json::parse(json_of(sample()));
  EXPECT_EQ(json["layer"], 3);
  EXPECT_EQ(json["rows_per_rank"], (Json{10, 4}));
  EXPECT_EQ(json["experts_per_rank"], (Json{2, 1}));
  EXPECT_DOUBLE_EQ(json["imbalance"], 8.0 / (14.0 / 3.0));
  EXPECT_EQ(json["rel_l2"], 0.0025);
  EXPECT_EQ(json["seconds"], 0.5);
  EXPECT_EQ(json["planned_bytes"], 4096);
  EXPECT_EQ(json["repeat_bitwise_equal"], true);
}

TEST(RunReport, JsonIsNullWithoutReferenceAndWithoutRows) {
  RunReport report = sample();
  report.comparison.reset();
  report.rows_per_expert = {0, 0, 0};
  const Json json = Json::parse(json_of(report));
  for (const char* key : {"rel_l2", "cosine", "max_abs", "imbalance"}) {
    EXPECT_TRUE(json[key].is_null()) << key;
  }
  EXPECT_TRUE(is_within_tolerance(report));
}

TEST(RunReport, JsonStaysANumberWhereTheOutputIsInfinitelyFar) {
  RunReport report = sample();
  constexpr double kFar = std::numeric_limits<double>::max();
  report.comparison = Comparison{kFar, 0.0, kFar};
  EXPECT_EQ(Json::parse(json_of(report))["rel_l2"].get<double>(), kFar);
  report.tolerance = 1e300;
  EXPECT_FALSE(is_within_tolerance(report));
  EXPECT_NE(text_of(report).find("infinite (tolerance"), std::string::npos) << text_of(report);
}

TEST(RunReport, CountsWhatIsNoNumber) {
  RunReport report = sample();
  EXPECT_FALSE(Json::parse(json_of(report)).contains("left_out"));
  EXPECT_EQ(text_of(report).find("NaN or infinite"), std::string::npos);
  report.comparison->num_left_out = 384;
  EXPECT_NE(text_of(report).find("NaN or infinite 384 of both, left out"), std::string::npos)
      << text_of(report);
  report.comparison->num_one_sided = 7;
  EXPECT_EQ(Json::parse(json_of(report))["one_sided"], 7);
  EXPECT_NE(text_of(report).find("7 elements of y or the reference alone; 384 of both"),
            std::string::npos)
      << text_of(report);
}

TEST(RunReport, JsonReplacesBytesThatAreNoText) {
  RunReport report = sample();
  report.checkpoint = "dir\xff\"\n";
  EXPECT_EQ(Json::parse(json_of(report))["checkpoint"], "dir\xEF\xBF\xBD\"\n");
}

TEST(RunReport, ToleranceIncludesItsLimit) {
  RunReport report = sample();
  report.tolerance = 0.0025;
  EXPECT_TRUE(is_within_tolerance(report));
  report.tolerance = 0.00249;
  EXPECT_FALSE(is_within_tolerance(report));
  EXPECT_NE(text_of(report).find("OUTSIDE"), std::string::npos);
}

bool says(const RunReport& report, const char* words) {
  return text_of(report).find(words) != std::string::npos;
}

TEST(RunReport, SaysWhyNothingIsCompared) {
  RunReport report = sample();
  report.comparison.reset();
  EXPECT_TRUE(says(report, "no y_ref in the input"));
  report.is_reference_of_another_layer = true;
  EXPECT_FALSE(says(report, "no y_ref in the input"));
  EXPECT_TRUE(says(report, "not compared: y_ref is of the layer without --rmsnorm"));
}

// Of one call there is nothing to compare, unless it made several backwards.
TEST(RunReport, SaysWhetherRepeatsHadTheSameBits) {
  RunReport report = sample();
  EXPECT_TRUE(says(report, "bitwise equal"));
  report.call_seconds = {0.5};
  report.training = TrainingReport{.num_forwards = 1, .peaks = {}};
  EXPECT_FALSE(says(report, "repeats"));
  report.training->num_forwards = 3;
  EXPECT_TRUE(says(report, "bitwise equal"));
  report.repeat_bitwise_equal = false;
  EXPECT_FALSE(says(report, "bitwise equal"));
  EXPECT_TRUE(says(report, "DIFFERENT BITS"));
}

TEST(MedianOf, TakesTheMiddle) {
  EXPECT_EQ(median_of({3, 1, 2}), 2.0);
  EXPECT_EQ(median_of({4, 1, 2, 8}), 3.0);
  EXPECT_EQ(median_of({}), 0.0);
}

}  // namespace
}  // namespace distmoe::tools
