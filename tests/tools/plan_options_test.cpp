// SPDX-License-Identifier: Apache-2.0
//
// Invariant: words become the configuration that they say, sizes of one's own win over those of a
// model, and a wrong value is refused with the option, the value and what is legal.
#include "plan_options.hpp"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "plan/plan_testing.hpp"

namespace distmoe::tools {
namespace {

using Words = std::vector<std::string>;

PlanRequest request_for(Words words, PlanOptions& options) {
  CLI::App app;
  add_plan_options(app, options);
  std::ranges::reverse(words);
  app.parse(words);
  return request_of(options);
}

PlanRequest request_for(const Words& words) {
  PlanOptions options;
  return request_for(words, options);
}

template <typename... Expected>
void expect_refused(const Words& words, const Expected&... expected) {
  expect_error(
      ErrorCode::kInvalidArgument, [&] { request_for(words); }, expected...);
}

const Words kShape = {"--tokens", "64",      "--hidden", "96",        "--intermediate",
                      "160",      "--top-k", "3",        "--experts", "10"};

Words shape_and(const Words& more) {
  Words words = kShape;
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(PlanOptions, ReadsEveryOption) {
  PlanOptions options;
  const PlanRequest request = request_for(shape_and({"--ep",
                                                     "4",
                                                     "--layers",
                                                     "7",
                                                     "--slots",
                                                     "3",
                                                     "--slot-factor",
                                                     "0.5",
                                                     "--device-factor",
                                                     "1.25",
                                                     "--total-factor",
                                                     "3",
                                                     "--precision",
                                                     "mxfp8",
                                                     "--pipeline",
                                                     "mega",
                                                     "--distinct-experts",
                                                     "false",
                                                     "--budget",
                                                     "2GiB",
                                                     "--threads",
                                                     "5",
                                                     "--svg",
                                                     "plan.svg",
                                                     "--json"}),
                                          options);
  const Config& config = request.config;
  EXPECT_EQ(config.max_tokens, 64);
  EXPECT_EQ(config.hidden_dim, 96);
  EXPECT_EQ(config.intermediate_dim, 160);
  EXPECT_EQ(config.top_k, 3);
  EXPECT_EQ(config.num_experts, 10);
  EXPECT_EQ(config.max_moe_layers_per_activation_slot, 7);
  EXPECT_EQ(config.num_activation_slots, 3);
  EXPECT_EQ(config.activation_slot_capacity_factor, 0.5);
  EXPECT_EQ(config.device_scratch_capacity_factor, 1.25);
  EXPECT_EQ(config.host_scratch, (HostScratch{3.0, true}));
  EXPECT_EQ(config.precision, Precision::kMXFP8);
  EXPECT_EQ(config.pipeline, Pipeline::kMega);
  EXPECT_FALSE(config.distinct_experts);
  EXPECT_FALSE(config.inference);
  EXPECT_EQ(options.ep_size, 4);
  EXPECT_EQ(options.target.num_threads, 5);
  EXPECT_EQ(options.budget_bytes, std::int64_t{2} << 30);
  EXPECT_EQ(options.svg, "plan.svg");
  EXPECT_TRUE(options.json);
  EXPECT_TRUE(request.title.empty());
}

TEST(PlanOptions, ReadsPolicyInferenceAndSlotBytes) {
  EXPECT_EQ(request_for(shape_and({"--activation-policy", "lean"})).config.activation_policy,
            ActivationPolicy::kLean);
  EXPECT_TRUE(request_for(shape_and({"--inference"})).config.inference);
  EXPECT_EQ(request_for(shape_and({"--slot-bytes", "4096"})).config.activation_slot_bytes, 4096);
  EXPECT_EQ(request_for(kShape).config.max_moe_layers_per_activation_slot, 1);
}

TEST(PlanOptions, AModelBringsTheShapeAndOwnSizesWin) {
  const PlanRequest whole = request_for({"--model", "qwen3-30b-a3b", "--tokens", "9"});
  EXPECT_EQ(whole.title, "Qwen3-30B-A3B");
  EXPECT_EQ(whole.config.hidden_dim, 2048);
  EXPECT_EQ(whole.config.intermediate_dim, 768);
  EXPECT_EQ(whole.config.top_k, 8);
  EXPECT_EQ(whole.config.num_experts, 128);
  EXPECT_EQ(whole.config.max_moe_layers_per_activation_slot, 48);
  const PlanRequest changed =
      request_for({"--top-k", "2", "--layers", "6", "--model", "qwen3-30b-a3b", "--tokens", "9"});
  EXPECT_EQ(changed.config.top_k, 2);
  EXPECT_EQ(changed.config.max_moe_layers_per_activation_slot, 6);
  EXPECT_EQ(changed.config.num_experts, 128);
}

TEST(PlanOptions, RefusesMissingSizesAndWrongValues) {
  expect_refused({"--tokens", "64"}, "--hidden is missing", "--model");
  expect_refused({"--tokens", "64", "--hidden", "4", "--intermediate", "4", "--top-k", "1"},
                 "--experts is missing");
  expect_refused({"--tokens", "0"}, "--tokens is '0'", "1..2147483647");
  expect_refused({"--tokens", "4", "--model", "nothing"}, "'nothing' is not known");
  expect_refused(shape_and({"--ep", "-1"}), "--ep is '-1'");
  expect_refused(shape_and({"--slot-factor", "nan"}), "--slot-factor is 'nan'", ">= 0");
  expect_refused(shape_and({"--device-factor", "0"}), "--device-factor is '0'", "> 0");
  expect_refused(shape_and({"--precision", "fp8"}), "--precision is 'fp8'", "bf16 or mxfp8");
  expect_refused(shape_and({"--distinct-experts", "yes"}), "--distinct-experts is 'yes'");
  expect_refused(shape_and({"--budget", "lots"}), "--budget is 'lots'", "GiB");
  EXPECT_THROW(request_for({"--hidden", "4"}), CLI::RequiredError);
  EXPECT_THROW(request_for({"--tokens", "4", "--model", "DBRX", "--checkpoint", "dir"}),
               CLI::ExcludesError);
}

TEST(PlanOptions, BytesTakeBinaryAndDecimalUnits) {
  EXPECT_EQ(parse_bytes("--budget", "0"), 0);
  EXPECT_EQ(parse_bytes("--budget", "9223372036854775807"), 9223372036854775807);
  EXPECT_EQ(parse_bytes("--budget", "80GiB"), 85899345920);
  EXPECT_EQ(parse_bytes("--budget", "1.5 KiB"), 1536);
  EXPECT_EQ(parse_bytes("--budget", "64GB"), 64000000000);
  for (const char* text :
       {"", "-1", "1.5", "GiB", "4 gib", "1e3", "9223372036854775808", "9000PiB", "-1GiB"}) {
    expect_error(
        ErrorCode::kInvalidArgument, [&] { parse_bytes("--budget", text); }, "--budget is '");
  }
}

TEST(PlanOptions, ReadsBackendAndCombine) {
  PlanOptions options;
  EXPECT_EQ(request_for(shape_and({}), options).config.combine, Combine::kPerRoute);
  EXPECT_EQ(options.target.backend, BackendKind::kCpu);
  const PlanRequest request =
      request_for(shape_and({"--backend", "cuda", "--combine", "per_rank"}), options);
  EXPECT_EQ(request.config.combine, Combine::kPerRank);
  EXPECT_EQ(options.target.backend, BackendKind::kCuda);
  expect_refused(shape_and({"--backend", "rocm"}), "--backend", "rocm", "cpu or cuda");
  expect_refused(shape_and({"--combine", "per_token"}), "--combine", "per_route or per_rank");
}

}  // namespace
}  // namespace distmoe::tools
