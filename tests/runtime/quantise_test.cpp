// SPDX-License-Identifier: Apache-2.0
//
// Invariant: quantise() writes the codes and scales of the numerics contract for every format and
// every shape of block, edges included, and dequantise() their exact values; what a matrix cannot
// be is refused with what was given, before anything is written.
#include "distmoe/quantise.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "conformance/coded_values.hpp"
#include "conformance/moe_problem.hpp"
#include "conformance/moe_refusal.hpp"

namespace distmoe {
namespace {

using conformance::CodedValues;
using conformance::expect_error;
using conformance::outcome_of;

/// The arrays of a matrix with memory, every byte 0xA5.
struct OwnedMatrix {
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> factors;
  QuantisedMatrix matrix;

  OwnedMatrix(Precision format, BlockShape blocks, std::int64_t rows, std::int64_t columns)
      : matrix(quantised_layout(format, blocks, rows, columns)) {
    codes.assign(matrix.codes.num_bytes(), 0xA5);
    scales.assign(matrix.scales.num_bytes(), 0xA5);
    factors.assign(static_cast<std::size_t>(matrix.factors.num_elements()), -1.0F);
    matrix.codes.data = codes.data();
    matrix.scales.data = scales.data();
    if (matrix.factors.is_given()) matrix.factors.data = factors.data();
  }
};

struct Case {
  const char* name;
  Precision format;
  BlockShape blocks;
  std::int64_t block_rows, block_columns;
};

constexpr Case kCases[] = {{"mxfp8_rows", Precision::kMXFP8, BlockShape::kRows, 1, 32},
                           {"mxfp8_columns", Precision::kMXFP8, BlockShape::kColumns, 32, 1},
                           {"mxfp8_tiles", Precision::kMXFP8, BlockShape::kTiles, 32, 32},
                           {"mxfp4", Precision::kMXFP4, BlockShape::kRows, 1, 32},
                           {"nvfp4", Precision::kNVFP4, BlockShape::kRows, 1, 16}};

CodedValues oracle_of(const Case& which, const std::vector<double>& values,
                      conformance::MatrixShape shape) {
  switch (which.format) {
    case Precision::kNVFP4: return conformance::nvfp4_values(values, shape, false);
    case Precision::kMXFP4: return conformance::mxfp4_values(values, shape);
    default: return conformance::mxfp8_values(values, shape, which.block_rows, which.block_columns);
  }
}

class Quantise : public testing::TestWithParam<Case> {};

TEST_P(Quantise, WritesCodesAndScalesAndReadsTheirValues) {
  const Case& which = GetParam();
  for (const auto& [rows, columns] : {std::pair{70, 96}, std::pair{1, 32}, std::pair{33, 64}}) {
    const std::int64_t stride = columns + 5;
    std::vector<BF16> memory(static_cast<std::size_t>(rows * stride),
                             to_bf16(std::numeric_limits<float>::quiet_NaN()));
    std::vector<double> values;
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const BF16 value = to_bf16(3 * conformance::uniform(7, static_cast<std::uint64_t>(i)));
      memory[static_cast<std::size_t>(i / columns * stride + i % columns)] = value;
      values.push_back(to_float(value));
    }
    OwnedMatrix own(which.format, which.blocks, rows, columns);
    quantise(TensorView::strided(memory.data(), DType::kBF16, {rows, columns}, {stride, 1}),
             own.matrix);
    const CodedValues expected = oracle_of(which, values, {rows, columns});
    const bool is_mxfp8 = which.format == Precision::kMXFP8;
    EXPECT_EQ(own.codes, is_mxfp8 ? expected.codes : conformance::packed_pairs(expected.codes));
    EXPECT_EQ(own.scales, expected.scales);
    EXPECT_EQ(own.factors, expected.factors);
    std::vector<float> decoded(values.size(), -1.0F);
    dequantise(own.matrix, {decoded.data(), DType::kF32, {rows, columns}});
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(decoded[i], static_cast<float>(expected.values[i])) << i;
      ASSERT_NEAR(decoded[i], values[i], 0.75) << i;
    }
  }
}

TEST_P(Quantise, TakesEdgesAndNothing) {
  const Case& which = GetParam();
  const std::int64_t rows = 35;
  const std::int64_t columns = 37;
  // 64 times larger or smaller from block to block, so that no scale serves another.
  const auto magnitude_at = [&](std::size_t i) {
    const auto row = static_cast<std::int64_t>(i) / columns;
    const auto column = static_cast<std::int64_t>(i) % columns;
    return std::exp2(6.0F * static_cast<float>(row / 32 - column / 32));
  };
  std::vector<BF16> values;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows * columns); ++i) {
    const double value = conformance::uniform(8, i);
    values.push_back(to_bf16(static_cast<float>(value) * magnitude_at(i)));
  }
  OwnedMatrix own(which.format, which.blocks, rows, columns);
  quantise({values.data(), DType::kBF16, {rows, columns}}, own.matrix);
  std::vector<float> decoded(values.size(), std::numeric_limits<float>::quiet_NaN());
  dequantise(own.matrix, {decoded.data(), DType::kF32, {rows, columns}});
  // Between the largest values of E2M1 lies a third of a block's largest.
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(decoded[i], to_float(values[i]), 0.34F * magnitude_at(i)) << i;
  }
  for (const auto& [no_rows, no_columns] : {std::pair{0, 37}, std::pair{35, 0}}) {
    OwnedMatrix empty(which.format, which.blocks, no_rows, no_columns);
    quantise({values.data(), DType::kBF16, {no_rows, no_columns}}, empty.matrix);
    dequantise(empty.matrix, {decoded.data(), DType::kF32, {no_rows, no_columns}});
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Quantise, testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

TEST(QuantiseRefusals, NameWhatWasGiven) {
  const std::vector<BF16> values(64 * 64, to_bf16(1.0F));
  std::vector<float> decoded(64 * 64);
  const TensorView given{values.data(), DType::kBF16, {64, 64}};
  OwnedMatrix own(Precision::kMXFP8, BlockShape::kTiles, 64, 64);
  const auto refuses = [&](const TensorView& from, QuantisedMatrix out, const char* words) {
    expect_error(outcome_of([&] { quantise(from, out); }), ErrorCode::kInvalidArgument, {words});
  };
  refuses({values.data(), DType::kBF16, {64}}, own.matrix, "values must be [R, C], got bf16 [64]");
  refuses({decoded.data(), DType::kF32, {64, 64}}, own.matrix, "values must be bf16");
  refuses({values.data(), DType::kBF16, {64, 64}, {DeviceType::kCuda, 0}}, own.matrix,
          "values must be in host memory");
  refuses(TensorView::strided(const_cast<BF16*>(values.data()), DType::kBF16, {64, 64}, {1, 64}),
          own.matrix, "values needs stride 1");
  refuses({nullptr, DType::kBF16, {64, 64}}, own.matrix, "no address of bf16");
  refuses({values.data(), DType::kBF16, {32, 64}}, own.matrix, "codes must be f8_e4m3 [32, 64]");
  QuantisedMatrix changed = own.matrix;
  changed.scales.shape[0] = 1;
  refuses(given, changed, "scales must be f8_e8m0 [2, 2]");
  changed = own.matrix;
  changed.factors = {decoded.data(), DType::kF32, {64}};
  refuses(given, changed, "factors must be left out");
  changed = own.matrix;
  changed.format = Precision::kBF16;
  refuses(given, changed, "is bf16; legal are mxfp8, mxfp4 and nvfp4");
  changed.format = Precision::kNVFP4;
  refuses(given, changed, "nvfp4 has blocks of rows alone");
  expect_error(
      outcome_of([] { (void)quantised_layout(Precision::kMXFP8, BlockShape::kRows, -1, 2); }),
      ErrorCode::kInvalidArgument, {"[-1, 2]"});
  expect_error(outcome_of([&] {
                 dequantise(own.matrix, {decoded.data(), DType::kF32, {64, 32}});
               }),
               ErrorCode::kInvalidArgument, {"codes must be f8_e4m3 [64, 32]"});
  EXPECT_EQ(own.codes, std::vector<std::uint8_t>(64 * 64, 0xA5));
}

}  // namespace
}  // namespace distmoe
