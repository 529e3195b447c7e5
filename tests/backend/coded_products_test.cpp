// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a product of codes is the FP64 product of what they decode to, within the error of
// FP32 summation: the only error of a low precision is its format's. Codes and scales are those of
// the second derivation, byte for byte, whether a row was quantised in place or packed on its way.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "backend/cpu/coded_rows.hpp"
#include "backend/cpu/weight_operands.hpp"
#include "conformance/coded_values.hpp"
#include "conformance/moe_problem.hpp"
#include "distmoe/prepared_weight.hpp"

namespace distmoe::cpu {
namespace {

using conformance::CodedValues;
using conformance::MatrixShape;

constexpr std::int64_t kHidden = 544;  // more scales than a vector register holds; reports: A50
constexpr std::int64_t kInner = 288;   // more columns than a slab
constexpr std::int64_t kRows = 37;

std::vector<BF16> random_matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  std::vector<BF16> values;
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    // Magnitudes of many binades.
    const auto at = static_cast<std::uint64_t>(i);
    const double spread = std::exp2(8.0 * conformance::uniform(seed + 1, at / 7));
    values.push_back(to_bf16(conformance::uniform(seed, at) * spread));
  }
  return values;
}

std::vector<double> as_doubles(const std::vector<BF16>& values) {
  std::vector<double> doubles;
  for (const BF16 value : values) doubles.push_back(to_float(value));
  return doubles;
}

Config config_of(Precision precision, bool inference) {
  Config config;
  config.precision = precision;
  config.inference = inference;
  config.hidden_dim = kHidden;
  config.intermediate_dim = kInner;
  return config;
}

/// Memory of a worker.
class OwnWorkspace {
 public:
  explicit OwnWorkspace(const Config& config)
      : layout_(config), bytes_(static_cast<std::size_t>(layout_.bytes) + kRegionAlignment) {}
  Workspace parts() {
    void* base = bytes_.data();
    std::size_t space = bytes_.size();
    std::align(kRegionAlignment, static_cast<std::size_t>(layout_.bytes), base, space);
    return {static_cast<std::byte*>(base), layout_};
  }

 private:
  CpuWorkspaceLayout layout_;
  std::vector<std::byte> bytes_;
};

/// sums[m, n] against a [m, k] b [n, k]^T, relative to the norm of a row.
void expect_product(const float* sums, std::int64_t num_columns, std::int64_t first_column,
                    const std::vector<double>& a, const std::vector<double>& b,
                    std::int64_t depth) {
  for (std::int64_t m = 0; m < std::ssize(a) / depth; ++m) {
    double error = 0;
    double norm = 0;
    for (std::int64_t n = 0; n < num_columns; ++n) {
      double sum = 0;
      for (std::int64_t k = 0; k < depth; ++k) {
        sum += a[static_cast<std::size_t>(m * depth + k)] *
               b[static_cast<std::size_t>((first_column + n) * depth + k)];
      }
      error += std::pow(static_cast<double>(sums[m * num_columns + n]) - sum, 2);
      norm += sum * sum;
    }
    ASSERT_LE(std::sqrt(error), 1e-5 * std::sqrt(norm)) << "row " << m;
  }
}

struct FormatCase {
  Precision precision;
  bool inference;
};

class CodedProducts : public testing::TestWithParam<FormatCase> {
 protected:
  Precision precision() const { return GetParam().precision; }
  bool inference() const { return GetParam().inference; }
  CodedValues coded_rows(const std::vector<double>& rows, MatrixShape shape) const {
    if (precision() == Precision::kNVFP4) return conformance::nvfp4_values(rows, shape, false);
    return conformance::mxfp8_values(rows, shape, 1, 32);
  }
  CodedValues coded_weight(const std::vector<double>& weight, MatrixShape shape) const {
    if (precision() == Precision::kNVFP4) return conformance::nvfp4_values(weight, shape, true);
    if (precision() == Precision::kMXFP4) return conformance::mxfp4_values(weight, shape);
    return conformance::mxfp8_values(weight, shape, inference() ? 1 : 32, 32);
  }
};

TEST_P(CodedProducts, OfRowsAndSlabsAreThoseOfTheDecodedValues) {
  const Config config = config_of(precision(), inference());
  OwnWorkspace memory(config);
  const Workspace workspace = memory.parts();
  std::vector<BF16> x = random_matrix(kRows, kHidden, 800);
  const std::vector<BF16> w13 = random_matrix(2 * kInner, kHidden, 810);
  const TensorView weight{w13.data(), DType::kBF16, {1, 2 * kInner, kHidden}};
  const PreparedWeight prepared =
      prepare_block_scaled_weight(weight, {.format = precision(), .inference = inference()});
  const PreparedWeightView& view = prepared.view();
  const auto* codes = static_cast<const std::byte*>(view.codes.data);
  const auto* scales = static_cast<const std::byte*>(view.scales.data);
  ExpertMatrices experts;
  experts.coded_gate = {.codes = codes,
                        .scales = scales,
                        .global_scale = static_cast<const float*>(view.global_scales.data),
                        .code_stride = view.codes.strides[1],
                        .scale_stride = view.scales.strides[1]};

  std::vector<std::byte> region(static_cast<std::size_t>(4 * kRows * kHidden));
  const bool has_codes = is_block_scaled(precision());
  RowOperand rows(DenseRows{x.data(), kHidden});
  if (has_codes) {
    const CodedRows coded(precision(), region.data(), kRows, kHidden);
    coded.encode({x.data(), kRows, kHidden, kHidden}, 0);
    rows = RowOperand(coded);
  }
  const std::vector<double> a =
      has_codes ? coded_rows(as_doubles(x), {kRows, kHidden}).values : as_doubles(x);
  const std::vector<double> b = coded_weight(as_doubles(w13), {2 * kInner, kHidden}).values;
  const WeightOperands weights(config, experts);
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{256}}) {
    const std::int64_t count = std::min<std::int64_t>(256, kInner - first);
    multiply(rows.rows(0, kRows, workspace),
             weights.rows(Projection::kGate, 0, first, count, workspace), kHidden, workspace.tile,
             workspace);
    rows.scale_sums(0, kRows, weights.result_factor(Projection::kGate, 0), workspace.tile, count);
    expect_product(workspace.tile, count, first, a, b, kHidden);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CodedProducts,
                         testing::Values(FormatCase{Precision::kMXFP8, true},
                                         FormatCase{Precision::kMXFP8, false},
                                         FormatCase{Precision::kNVFP4, true},
                                         FormatCase{Precision::kMXFP4, true}));

TEST(CodedRowsTest, HaveTheCodesOfTheSecondDerivationInPlaceAndPacked) {
  for (const Precision precision : {Precision::kMXFP8, Precision::kNVFP4}) {
    std::vector<BF16> x = random_matrix(kRows, kHidden, 820);
    std::fill_n(x.begin() + 3 * kHidden, kHidden, BF16{0x8000});  // negative zeros
    x[5 * kHidden + 70] = BF16{0x7F80};
    x[6 * kHidden + 1] = BF16{0xFFC1};
    const MatrixShape shape{kRows, kHidden};
    const bool is_nvfp4 = precision == Precision::kNVFP4;
    const CodedValues expected = is_nvfp4 ? conformance::nvfp4_values(as_doubles(x), shape, false)
                                          : conformance::mxfp8_values(as_doubles(x), shape, 1, 32);
    const std::vector<std::uint8_t> bytes =
        is_nvfp4 ? conformance::packed_pairs(expected.codes) : expected.codes;
    std::vector<std::byte> region(static_cast<std::size_t>(4 * kRows * kHidden));
    const CodedRows coded(precision, region.data(), kRows, kHidden);
    std::vector<std::byte> packed(
        static_cast<std::size_t>(PackedRowLayout(precision, kHidden).bytes));
    for (std::int64_t row = 0; row < kRows; ++row) {
      if (row % 2 == 0) {
        coded.encode({x.data() + row * kHidden, 1, kHidden, kHidden}, row);
      } else {
        pack_row(precision, x.data() + row * kHidden, kHidden, packed.data());
        coded.unpack(packed.data(), row);
      }
      const auto same = [&](const std::uint8_t* actual, const std::vector<std::uint8_t>& all,
                            std::int64_t size) {
        return std::memcmp(actual, all.data() + row * size, static_cast<std::size_t>(size)) == 0;
      };
      EXPECT_TRUE(same(coded.codes(row), bytes, coded.code_bytes())) << row;
      EXPECT_TRUE(same(coded.scales(row), expected.scales, coded.scale_bytes())) << row;
      if (is_nvfp4) {
        EXPECT_EQ(coded.factor(row), expected.factors[static_cast<std::size_t>(row)]);
      }
    }
  }
}

/// Blocks of 32 rows; the rows behind an expert's last are zeros whatever lay there.
TEST(CodedColumnsTest, HavePaddingOfZeros) {
  constexpr std::int64_t kPadded = 128;
  const std::vector<BF16> x = random_matrix(kRows, kHidden, 830);
  std::vector<double> padded = as_doubles(x);
  padded.resize(kPadded * kHidden);
  const CodedValues expected = conformance::mxfp8_values(padded, {kPadded, kHidden}, 32, 1);
  for (const int garbage : {0, 0x7F, 0xFF}) {  // reports: A58
    std::vector<std::byte> region(2 * kPadded * kHidden, static_cast<std::byte>(garbage));
    const CodedColumns columns(region.data(), kPadded, kHidden);
    columns.encode({x.data(), kRows, kHidden, kHidden, kPadded - kRows}, 0);
    EXPECT_EQ(std::memcmp(region.data(), expected.codes.data(), expected.codes.size()), 0);
    EXPECT_EQ(std::memcmp(region.data() + expected.codes.size(), expected.scales.data(),
                          expected.scales.size()),
              0);
    std::vector<BF16> decoded(kRows * 32);
    columns.decode({0, 0, kRows}, 64, 32, decoded.data());
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t i = 0; i < 32; ++i) {
        ASSERT_EQ(to_float(decoded[static_cast<std::size_t>(row * 32 + i)]),
                  expected.values[static_cast<std::size_t>(row * kHidden + 64 + i)]);
      }
    }
  }
}

std::vector<double> transposed(const std::vector<double>& matrix, std::int64_t columns) {
  std::vector<double> out(matrix.size());
  const auto width = static_cast<std::size_t>(columns);
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    out[i % width * (matrix.size() / width) + i / width] = matrix[i];
  }
  return out;
}

/// DGRAD: rows of gradients, quantised along themselves, by columns of a weight of tiles.
TEST(CodedGradientProducts, OfRowsAndColumnsOfTilesAreThoseOfTheDecodedValues) {
  const Config config = config_of(Precision::kMXFP8, false);
  OwnWorkspace memory(config);
  const Workspace workspace = memory.parts();
  const std::vector<BF16> grads = random_matrix(kRows, 2 * kInner, 850);
  const std::vector<BF16> w13 = random_matrix(2 * kInner, kHidden, 852);
  ExpertMatrices experts;
  experts.gate = w13.data();
  experts.up = w13.data() + kInner * kHidden;
  experts.w13_row_stride = kHidden;
  std::vector<std::byte> region(static_cast<std::size_t>(4 * kRows * kHidden));
  const CodedRows coded(Precision::kMXFP8, region.data(), kRows, 2 * kInner);
  coded.encode({grads.data(), kRows, 2 * kInner, 2 * kInner}, 0);
  const std::vector<double> a =
      conformance::mxfp8_values(as_doubles(grads), {kRows, 2 * kInner}, 1, 32).values;
  const std::vector<double> b = transposed(
      conformance::mxfp8_values(as_doubles(w13), {2 * kInner, kHidden}, 32, 32).values, kHidden);
  const RowOperand rows(coded);
  const WeightOperands weights(config, experts);
  for (const std::int64_t first : {0, 256, 512}) {
    const std::int64_t count = std::min<std::int64_t>(256, kHidden - first);
    multiply_dgrad(rows.rows(0, kRows, workspace), weights.w13_columns(0, first, count, workspace),
                   workspace.tile, workspace);
    expect_product(workspace.tile, count, first, a, b, 2 * kInner);
  }
}

/// WGRAD: gradients and activations, quantised across the rows of an expert.
TEST(CodedGradientProducts, OfColumnsAreThoseOfTheDecodedValues) {
  const Config config = config_of(Precision::kMXFP8, false);
  OwnWorkspace memory(config);
  const Workspace workspace = memory.parts();
  for (const std::int64_t depth : {1, 31, 32, 33, 37, 129, 512}) {
    SCOPED_TRACE(depth);
    const std::int64_t padded = ceil_div(depth, 128) * 128;
    const auto coded_columns = [&](std::int64_t width, std::uint64_t seed,
                                   std::vector<std::byte>& region) {
      const std::vector<BF16> values = random_matrix(depth, width, seed);
      region.assign(static_cast<std::size_t>(2 * padded * width), std::byte{0x7F});
      const CodedColumns columns(region.data(), padded, width);
      columns.encode({values.data(), depth, width, width, padded - depth}, 0);
      // Products with rows as their outer dimension.
      std::vector<double> all =
          conformance::mxfp8_values(as_doubles(values), {depth, width}, 32, 1).values;
      return std::pair(DepthOperand(columns), transposed(all, width));
    };
    std::vector<std::byte> grad_region, x_region;
    const auto [grads, a] = coded_columns(64, 860, grad_region);
    const auto [x, b] = coded_columns(kHidden, 862, x_region);
    for (const std::int64_t first : {0, 512}) {
      const std::int64_t count = std::min<std::int64_t>(512, kHidden - first);
      multiply_wgrad(grads.slab({0, 0, depth}, 0, 64, workspace.decoded_weights),
                     x.slab({0, 0, depth}, first, count, workspace.decoded_rows), depth,
                     workspace.tile, false, workspace);
      expect_product(workspace.tile, count, first, a, b, depth);
    }
  }
}

/// Columns of a weight for DGRAD are those of its rows for FPROP: one set of tiles.
TEST(WeightOperandsTest, ColumnsAreThoseOfTheRows) {
  const Config config = config_of(Precision::kMXFP8, false);
  OwnWorkspace memory(config);
  const Workspace workspace = memory.parts();
  const std::vector<BF16> w13 = random_matrix(2 * kInner, kHidden, 840);
  ExpertMatrices experts;
  experts.gate = w13.data();
  experts.up = w13.data() + kInner * kHidden;
  experts.w13_row_stride = kHidden;
  const std::vector<double> expected =
      conformance::mxfp8_values(as_doubles(w13), {2 * kInner, kHidden}, 32, 32).values;
  const WeightOperands weights(config, experts);
  const DepthRows columns = weights.w13_columns(0, 512, 32, workspace);
  ASSERT_EQ(columns.depth(), 2 * kInner);
  for (std::int64_t k = 0; k < columns.depth(); ++k) {
    for (std::int64_t i = 0; i < 32; ++i) {
      ASSERT_EQ(to_float(columns.row(k)[i]),
                expected[static_cast<std::size_t>(k * kHidden + 512 + i)]);
    }
  }
}

}  // namespace
}  // namespace distmoe::cpu
