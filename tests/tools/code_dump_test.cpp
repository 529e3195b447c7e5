// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the codes and scales that `distmoe run --dump-codes` writes are those of a second
// derivation from the checkpoint, byte for byte, and those with which y was computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "checkpoint_problem.hpp"
#include "command_testing.hpp"
#include "conformance/coded_h2.hpp"
#include "conformance/coded_values.hpp"
#include "plan/option_names.hpp"

namespace distmoe::tools {
namespace {

using conformance::CodedValues;
using conformance::MatrixShape;
using conformance::MoeProblem;

class CodeDump : public CheckpointLayerTest {
 protected:
  TensorFile dump(const std::string& precision, const Words& more = {}) {
    Words words{"--layer", std::to_string(layer()), "--json",     "--precision",
                precision, "--dump-codes",          file("codes")};
    words.insert(words.end(), more.begin(), more.end());
    const CommandResult result = run(checkpoint_, words);
    EXPECT_EQ(result.exit_code, 0) << result.error;
    return TensorFile(file("codes"));
  }
};

std::vector<double> as_doubles(const BF16* values, std::int64_t count) {
  std::vector<double> doubles;
  doubles.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) doubles.push_back(to_float(values[i]));
  return doubles;
}

/// The tensors of a dump, taken from front to back.
class Derivation {
 public:
  Derivation(const TensorFile& file, std::string precision)
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

TEST_P(CodeDump, HasTheCodesOfXAndTheWeightsOfTheSecondDerivation) {
  const MoeProblem problem = problem_of(checkpoint_, layer());
  const std::int64_t d = problem.shape.hidden_dim;
  const std::int64_t f = problem.shape.intermediate_dim;
  for (const char* precision : {"mxfp8", "nvfp4", "mxfp4"}) {
    const TensorFile codes = dump(precision);
    Derivation derivation(codes, precision);
    const bool has_rows = std::string(precision) != "mxfp4";
    EXPECT_EQ(codes.has("x_codes"), has_rows);
    EXPECT_EQ(codes.has("h2_codes"), has_rows);
    if (has_rows) {
      derivation.expect("x", as_doubles(problem.x.data(), problem.shape.num_tokens * d),
                        {problem.shape.num_tokens, d}, false);
    }
    for (std::int64_t expert = 0; expert < problem.shape.num_experts; ++expert) {
      std::vector<double> w13 = as_doubles(problem.gate.data() + expert * f * d, f * d);
      const std::vector<double> up = as_doubles(problem.up.data() + expert * f * d, f * d);
      w13.insert(w13.end(), up.begin(), up.end());
      derivation.expect("w13", w13, {2 * f, d}, true);
      derivation.expect("w2", as_doubles(problem.down.data() + expert * d * f, d * f), {d, f},
                        true);
    }
    derivation.expect_complete();
  }
}

// ---- h2: what is left open is how FP32 sums round

/// The rows of h2 in a dump, one after the other, against what the derivation allows.
class H2Derivation {
 public:
  H2Derivation(const TensorFile& file, bool is_nvfp4, std::int64_t width)
      : is_nvfp4_(is_nvfp4),
        width_(width),
        codes_(file.bytes_of("h2_codes")),
        scales_(file.bytes_of("h2_scales")) {
    if (is_nvfp4) factors_ = file.values("h2_global_scales");
  }

  /// A byte that no order of sums changes is that of the derivation; the others lie between those
  /// of the two values that h2 can be.
  void expect(const conformance::H2Row& row) {
    const CodedValues least = coded(row.least);
    const CodedValues most = coded(row.most);
    bool is_same_factor = true;
    if (is_nvfp4_) {
      const float factor = factors_[static_cast<std::size_t>(row.route)];
      is_same_factor = least.factors[0] == most.factors[0];
      EXPECT_TRUE(factor == 1.0F / least.factors[0] || factor == 1.0F / most.factors[0]);
    }
    const auto blocks = static_cast<std::int64_t>(least.scales.size());
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::uint8_t scale = scales_[at(row.route * blocks + block)];
      const auto [low, high] = std::minmax(least.scales[at(block)], most.scales[at(block)]);
      if (scale < low || scale > high) return report(row.route, block, "scale");
      num_bytes_ += width_ / blocks + 1;
      if (low != high || !is_same_factor) continue;
      ++num_certain_;
      for (std::int64_t i = block * width_ / blocks; i < (block + 1) * width_ / blocks; ++i) {
        const std::uint8_t code = code_of(row.route, i);
        const std::uint8_t a = least.codes[at(i)];
        const std::uint8_t b = most.codes[at(i)];
        const auto [low_value, high_value] = std::minmax({value_of(a), value_of(b)});
        const bool is_right =
            a == b ? code == a : value_of(code) >= low_value && value_of(code) <= high_value;
        if (!is_right) return report(row.route, i, "code");
        if (a == b) ++num_certain_;
      }
    }
  }
  double certain_share() const {
    return static_cast<double>(num_certain_) / static_cast<double>(num_bytes_);
  }

 private:
  static std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
  CodedValues coded(const std::vector<double>& row) const {
    return is_nvfp4_ ? conformance::nvfp4_values(row, {1, width_}, false)
                     : conformance::mxfp8_values(row, {1, width_}, 1, 32);
  }
  std::uint8_t code_of(std::int64_t route, std::int64_t column) const {
    const std::int64_t element = route * width_ + column;
    if (!is_nvfp4_) return codes_[at(element)];
    return static_cast<std::uint8_t>((codes_[at(element / 2)] >> (element % 2 * 4)) & 0xF);
  }
  double value_of(std::uint8_t code) const {
    return is_nvfp4_ ? conformance::e2m1_value(code) : conformance::e4m3_value(code);
  }
  static void report(std::int64_t route, std::int64_t place, const char* what) {
    ADD_FAILURE() << what << ' ' << place << " of h2 of route " << route;
  }

  bool is_nvfp4_;
  std::int64_t width_;
  std::vector<std::uint8_t> codes_;
  std::vector<std::uint8_t> scales_;
  std::vector<float> factors_;
  std::int64_t num_bytes_ = 0;
  std::int64_t num_certain_ = 0;
};

TEST_P(CodeDump, HasTheCodesOfH2OfTheSecondDerivation) {
  const MoeProblem problem = problem_of(checkpoint_, layer());
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4}) {
    const std::string name = option_name(precision);
    const TensorFile codes = dump(name);
    H2Derivation derivation(codes, precision == Precision::kNVFP4, problem.shape.intermediate_dim);
    const auto rows = conformance::coded_h2(problem, precision, 7);
    ASSERT_FALSE(rows.empty());
    for (const conformance::H2Row& row : rows) derivation.expect(row);
    EXPECT_GE(derivation.certain_share(), 0.94) << name;
  }
}

// ---- What was multiplied

/// What the dump says of h2, W2 and the scores is y: its codes are those that were multiplied.
TEST_P(CodeDump, TheDumpedCodesOfH2GiveY) {
  const MoeProblem problem = problem_of(checkpoint_, layer());
  const std::int64_t d = problem.shape.hidden_dim;
  const std::int64_t f = problem.shape.intermediate_dim;
  for (const char* pipeline : {"staged", "mega"}) {
    const TensorFile codes = dump("mxfp8", {"--pipeline", pipeline, "--output", file("y")});
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

INSTANTIATE_TEST_SUITE_P(Models, CodeDump, checkpoint_layers(), checkpoint_layer_name);

}  // namespace
}  // namespace distmoe::tools
