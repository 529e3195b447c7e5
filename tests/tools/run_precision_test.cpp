// SPDX-License-Identifier: Apache-2.0
//
// Invariant: on real checkpoints a low precision is as far from the reference as its format makes
// it, no further and no nearer; y has the same bits for every number of ranks and both pipelines;
// the codes and scales with which it was computed are those of the second derivation, byte for
// byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "checkpoint_problem.hpp"
#include "command_testing.hpp"
#include "conformance/coded_values.hpp"

namespace distmoe::tools {
namespace {

using conformance::CodedValues;
using conformance::MatrixShape;
using conformance::MoeProblem;

struct Range {
  const char* precision;
  double least, most, cosine;
};
constexpr Range kMxfp8{"mxfp8", 0.015, 0.033, 0.9995};
constexpr Range kNvfp4{"nvfp4", 0.06, 0.115, 0.9935};
constexpr Range kMxfp4{"mxfp4", 0.055, 0.10, 0.9945};

class RunPrecision : public CommandTest,
                     public testing::WithParamInterface<std::tuple<const char*, int>> {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder(std::get<0>(GetParam()));
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint " << std::get<0>(GetParam());
  }
  int layer() const { return std::get<1>(GetParam()); }

  nlohmann::json run_with(const Words& more, int exit_code = 0) {
    Words words{"--layer", std::to_string(layer()), "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, exit_code) << result.error;
    return result.exit_code <= 1 ? result.json() : nlohmann::json();
  }
  std::string y_of(const char* precision, const Words& more) {
    Words words{"--precision", precision, "--output", file("y")};
    words.insert(words.end(), more.begin(), more.end());
    run_with(words);
    return read_file(file("y"));
  }

  std::filesystem::path checkpoint_;
};

TEST_P(RunPrecision, IsAsFarFromTheReferenceAsItsFormatMakesIt) {
  for (const Range& range : {kMxfp8, kNvfp4, kMxfp4}) {
    const nlohmann::json json = run_with({"--precision", range.precision});
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["precision"], range.precision);
    EXPECT_GE(json["rel_l2"].get<double>(), range.least) << range.precision;
    EXPECT_LE(json["rel_l2"].get<double>(), range.most) << range.precision;
    EXPECT_GT(json["cosine"].get<double>(), range.cosine) << range.precision;
  }
}

TEST_P(RunPrecision, RanksAndPipelinesChangeNoBit) {
  for (const Range& range : {kMxfp8, kNvfp4, kMxfp4}) {
    const std::string y = y_of(range.precision, {});
    EXPECT_TRUE(y == y_of(range.precision, {"--pipeline", "mega", "--ranks", "3"}));
    EXPECT_TRUE(y == y_of(range.precision, {"--tokens-per-rank", "500,0,12"}));
  }
}

std::vector<double> as_doubles(const BF16* values, std::int64_t count) {
  std::vector<double> doubles;
  for (std::int64_t i = 0; i < count; ++i) doubles.push_back(to_float(values[i]));
  return doubles;
}

class Dump {
 public:
  Dump(const TensorFile& file, std::string precision)
      : file_(file), precision_(std::move(precision)) {}

  /// The tensors of `name` against a matrix [rows, columns] that has the values.
  void expect(const std::string& name, const std::vector<double>& matrix, MatrixShape shape,
              bool is_weight) {
    const CodedValues expected = coded(matrix, shape, is_weight);
    EXPECT_TRUE(next(name + "_codes", precision_ == "mxfp8"
                                          ? expected.codes
                                          : conformance::packed_pairs(expected.codes)))
        << name;
    EXPECT_TRUE(next(name + "_scales", expected.scales)) << name;
    if (precision_ != "nvfp4") return;
    const std::vector<float> factors = file_.values(name + "_global_scales");
    std::size_t& at = offsets_[name + "_global_scales"];
    for (const float factor : expected.factors) {
      ASSERT_LT(at, factors.size());
      EXPECT_EQ(factors[at++], 1.0F / factor) << name;
    }
  }
  /// Whether everything was looked at.
  void expect_complete() {
    for (const auto& [name, offset] : offsets_) {
      const StoredTensor& tensor = file_.tensor(name);
      EXPECT_EQ(offset * (tensor.dtype == DType::kF32 ? sizeof(float) : 1), tensor.data.size())
          << name;
    }
  }

 private:
  CodedValues coded(const std::vector<double>& matrix, MatrixShape shape, bool is_weight) const {
    if (precision_ == "nvfp4") return conformance::nvfp4_values(matrix, shape, is_weight);
    if (precision_ == "mxfp4") return conformance::mxfp4_values(matrix, shape);
    return conformance::mxfp8_values(matrix, shape, 1, 32);
  }
  /// The next bytes of a tensor.
  bool next(const std::string& name, const std::vector<std::uint8_t>& expected) {
    const std::vector<std::uint8_t> all = file_.bytes_of(name);
    std::size_t& at = offsets_[name];
    if (all.size() < at + expected.size()) return false;
    const bool is_equal =
        std::equal(expected.begin(), expected.end(), all.begin() + static_cast<std::ptrdiff_t>(at));
    at += expected.size();
    return is_equal;
  }

  const TensorFile& file_;
  std::string precision_;
  std::map<std::string, std::size_t> offsets_;
};

/// h2 is what the codes of x and W13 give, so its codes are derived from what the file says of
/// those: the values that were quantised are not in it. Here x and the weights.
TEST_P(RunPrecision, DumpsTheCodesOfTheSecondDerivation) {
  const MoeProblem problem = problem_of(checkpoint_, layer());
  const std::int64_t d = problem.shape.hidden_dim;
  const std::int64_t f = problem.shape.intermediate_dim;
  for (const char* precision : {"mxfp8", "nvfp4", "mxfp4"}) {
    run_with({"--precision", precision, "--dump-codes", file("codes")});
    const TensorFile codes(file("codes"));
    Dump dump(codes, precision);
    const bool has_rows = std::string(precision) != "mxfp4";
    EXPECT_EQ(codes.has("x_codes"), has_rows);
    EXPECT_EQ(codes.has("h2_codes"), has_rows);
    if (has_rows) {
      dump.expect("x", as_doubles(problem.x.data(), problem.shape.num_tokens * d),
                  {problem.shape.num_tokens, d}, false);
    }
    for (std::int64_t expert = 0; expert < problem.shape.num_experts; ++expert) {
      std::vector<double> w13 = as_doubles(problem.gate.data() + expert * f * d, f * d);
      const std::vector<double> up = as_doubles(problem.up.data() + expert * f * d, f * d);
      w13.insert(w13.end(), up.begin(), up.end());
      dump.expect("w13", w13, {2 * f, d}, true);
      dump.expect("w2", as_doubles(problem.down.data() + expert * d * f, d * f), {d, f}, true);
    }
    dump.expect_complete();
  }
}

/// What the dump says of h2, W2 and the scores is y: its codes are those that were multiplied.
TEST_P(RunPrecision, TheDumpedCodesOfH2GiveY) {
  const MoeProblem problem = problem_of(checkpoint_, layer());
  const std::int64_t d = problem.shape.hidden_dim;
  const std::int64_t f = problem.shape.intermediate_dim;
  for (const char* pipeline : {"staged", "mega"}) {
    run_with({"--precision", "mxfp8", "--pipeline", pipeline, "--dump-codes", file("codes"),
              "--output", file("y")});
    const TensorFile codes(file("codes"));
    const std::vector<std::uint8_t> h2 = codes.bytes_of("h2_codes");
    const std::vector<std::uint8_t> h2_scales = codes.bytes_of("h2_scales");
    const std::vector<std::uint8_t> w2 = codes.bytes_of("w2_codes");
    const std::vector<std::uint8_t> w2_scales = codes.bytes_of("w2_scales");
    const std::vector<float> y = TensorFile(file("y")).values("y");
    const auto decoded = [](const std::vector<std::uint8_t>& all,
                            const std::vector<std::uint8_t>& scales, std::int64_t index) {
      return conformance::e4m3_value(all[static_cast<std::size_t>(index)]) *
             std::ldexp(1.0, scales[static_cast<std::size_t>(index / 32)] - 127);
    };
    double error = 0;
    double norm = 0;
    for (std::int64_t token = 0; token < 512; token += 37) {
      for (std::int64_t column = 0; column < d; ++column) {
        double sum = 0;
        for (std::int64_t k = 0; k < problem.shape.top_k; ++k) {
          const std::int64_t route = token * problem.shape.top_k + k;
          const std::int64_t expert = problem.ids[static_cast<std::size_t>(route)];
          double h3 = problem.down_bias.empty()
                          ? 0.0
                          : problem.down_bias[static_cast<std::size_t>(expert * d + column)];
          for (std::int64_t i = 0; i < f; ++i) {
            h3 += decoded(h2, h2_scales, route * f + i) *
                  decoded(w2, w2_scales, (expert * d + column) * f + i);
          }
          sum += problem.scores[static_cast<std::size_t>(route)] * h3;
        }
        const double actual = y[static_cast<std::size_t>(token * d + column)];
        error += (actual - sum) * (actual - sum);
        norm += sum * sum;
      }
    }
    // h3 and y are rounded to BF16 each.
    EXPECT_LE(std::sqrt(error / norm), 3.5e-3) << pipeline;
  }
}

TEST_P(RunPrecision, WhatCannotRunSaysWhy) {
  const auto refused = [&](const Words& more, const std::string& word) {
    Words words{"--layer", "0"};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 2) << testing::PrintToString(more);
    EXPECT_NE(result.error.find(word), std::string::npos) << result.error;
  };
  refused({"--precision", "fp8"}, "--precision is 'fp8'");
  refused({"--pipeline", "fast"}, "--pipeline is 'fast'");
  refused({"--precision", "nvfp4", "--train"}, "inference");
  refused({"--dump-codes", file("codes")}, "--precision mxfp8, nvfp4 or mxfp4");
  refused({"--precision", "mxfp8", "--dump-codes", file("codes"), "--ranks", "2"}, "one rank");
  EXPECT_FALSE(std::filesystem::exists(file("codes")));
  const CommandResult outside =
      run(checkpoint_, {"--layer", "0", "--precision", "mxfp8", "--tolerance", "0.008"});
  EXPECT_EQ(outside.exit_code, 1);
}

INSTANTIATE_TEST_SUITE_P(Models, RunPrecision,
                         testing::Combine(testing::Values("qwen3moe", "mixtral", "gptoss",
                                                          "deepseekv3"),
                                          testing::Values(0, 1)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + "Layer" +
                                  std::to_string(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace distmoe::tools
