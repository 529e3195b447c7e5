// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a prepared weight holds the codes and scales of the numerics contract, byte for byte,
// in the row order of the weight, whatever its layout and strides; refilling keeps its addresses;
// what a format cannot hold is refused with the values, before anything is written.
#include "distmoe/prepared_weight.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "conformance/coded_values.hpp"
#include "conformance/moe_problem.hpp"
#include "conformance/moe_refusal.hpp"

/// With AddressSanitizer, too, an allocation that fails is one that the library hears of.
// NOTE: the sanitizer looks for it from a library of its own.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}

namespace distmoe {
namespace {

using conformance::CodedValues;
using conformance::expect_error;
using conformance::MatrixShape;
using conformance::outcome_of;

constexpr std::int64_t kExperts = 2;
constexpr std::int64_t kInner = 64;
constexpr std::int64_t kColumns = 96;

std::vector<BF16> random_values(std::int64_t count, std::uint64_t seed) {
  std::vector<BF16> values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(to_bf16(3 * conformance::uniform(seed, static_cast<std::uint64_t>(i))));
  }
  return values;
}

/// Rows of one expert, of `rows`, in this order.
std::vector<double> matrix_of(const std::vector<BF16>& w13, std::int64_t expert,
                              const std::vector<std::int64_t>& rows) {
  std::vector<double> matrix;
  for (const std::int64_t row : rows) {
    for (std::int64_t k = 0; k < kColumns; ++k) {
      matrix.push_back(
          to_float(w13[static_cast<std::size_t>((expert * 2 * kInner + row) * kColumns + k)]));
    }
  }
  return matrix;
}

CodedValues coded_of(const std::vector<double>& matrix, const BlockScaledConfig& config) {
  const MatrixShape shape{std::ssize(matrix) / kColumns, kColumns};
  switch (config.format) {
    case Precision::kNVFP4: return conformance::nvfp4_values(matrix, shape, true);
    case Precision::kMXFP4: return conformance::mxfp4_values(matrix, shape);
    default: return conformance::mxfp8_values(matrix, shape, config.inference ? 1 : 32, 32);
  }
}

/// Row `row` of an array of `view`, as bytes.
std::vector<std::uint8_t> row_bytes(const TensorView& view, std::int64_t expert, std::int64_t row) {
  const auto* data = static_cast<const std::uint8_t*>(view.data) + expert * view.strides[0] +
                     row * view.strides[1];
  return {data, data + view.shape[2]};
}

std::vector<std::uint8_t> part(const std::vector<std::uint8_t>& all, std::int64_t row,
                               std::int64_t width) {
  return {all.begin() + row * width, all.begin() + (row + 1) * width};
}

/// Rows `rows` of every expert of `weight`, whose scale rows are `scale_rows`, against the second
/// derivation of the matrix that they are.
void expect_codes(const PreparedWeightView& prepared, const std::vector<BF16>& w13,
                  const std::vector<std::int64_t>& rows,
                  const std::vector<std::int64_t>& scale_rows) {
  const bool is_4bit = prepared.config.format != Precision::kMXFP8;
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    const CodedValues expected = coded_of(matrix_of(w13, expert, rows), prepared.config);
    const std::vector<std::uint8_t> codes =
        is_4bit ? conformance::packed_pairs(expected.codes) : expected.codes;
    for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
      EXPECT_EQ(row_bytes(prepared.codes, expert, rows[static_cast<std::size_t>(i)]),
                part(codes, i, prepared.codes.shape[2]));
    }
    for (std::int64_t i = 0; i < std::ssize(scale_rows); ++i) {
      EXPECT_EQ(row_bytes(prepared.scales, expert, scale_rows[static_cast<std::size_t>(i)]),
                part(expected.scales, i, prepared.scales.shape[2]));
    }
    if (prepared.global_scales.is_given()) {
      EXPECT_EQ(static_cast<const float*>(prepared.global_scales.data)[expert],
                1.0F / expected.factors[0]);
    }
  }
}

std::vector<std::int64_t> every(std::int64_t step, std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(first + i * step);
  return rows;
}

const std::vector<BlockScaledConfig>& formats() {
  static const std::vector<BlockScaledConfig> all{{Precision::kMXFP8, false},
                                                  {Precision::kMXFP8, true},
                                                  {Precision::kNVFP4, true},
                                                  {Precision::kMXFP4, true}};
  return all;
}

TEST(PreparedWeightTest, HoldsTheCodesOfTheSecondDerivation) {
  const std::vector<BF16> w13 = random_values(kExperts * 2 * kInner * kColumns, 900);
  for (const BlockScaledConfig& config : formats()) {
    const PreparedWeight prepared = prepare_block_scaled_weight(
        {w13.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}}, config);
    const std::int64_t tile = config.inference ? 1 : 32;
    expect_codes(prepared.view(), w13, every(1, 0, 2 * kInner), every(1, 0, 2 * kInner / tile));
    EXPECT_EQ(prepared.num_bytes(), prepared.view().codes.num_bytes() +
                                        prepared.view().scales.num_bytes() +
                                        prepared.view().global_scales.num_bytes());
    EXPECT_NO_THROW(check_scales(prepared.view()));
  }
}

/// Gate and up rows of interleaved weights have tiles of their own.
TEST(PreparedWeightTest, InterleavedRowsKeepTheirPlacesAndTheirTiles) {
  const std::vector<BF16> w13 = random_values(kExperts * 2 * kInner * kColumns, 910);
  for (BlockScaledConfig config : formats()) {
    config.gate_up_layout = GateUpLayout::kInterleaved;
    const PreparedWeight prepared = prepare_block_scaled_weight(
        {w13.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}}, config);
    if (config.format == Precision::kNVFP4) continue;  // one factor for both: below
    const std::int64_t scale_rows = config.inference ? kInner : kInner / 32;
    for (const std::int64_t half : {0, 1}) {
      expect_codes(prepared.view(), w13, every(2, half, kInner), every(2, half, scale_rows));
    }
  }
}

TEST(PreparedWeightTest, GateAndUpOfAnExpertShareAFactorInEveryLayout) {
  std::vector<BF16> halves = random_values(kExperts * 2 * kInner * kColumns, 920);
  halves[5] = to_bf16(100.0F);  // of the gate of expert 0
  std::vector<BF16> interleaved(halves.size());
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    for (std::int64_t row = 0; row < 2 * kInner; ++row) {
      const std::int64_t to = row < kInner ? 2 * row : 2 * (row - kInner) + 1;
      std::copy_n(halves.begin() + (expert * 2 * kInner + row) * kColumns, kColumns,
                  interleaved.begin() + (expert * 2 * kInner + to) * kColumns);
    }
  }
  const BlockScaledConfig config{Precision::kNVFP4, true};
  BlockScaledConfig alternating = config;
  alternating.gate_up_layout = GateUpLayout::kInterleaved;
  const PreparedWeight a = prepare_block_scaled_weight(
      {halves.data(), DType::kBF16, {kExperts, 2, kInner, kColumns}}, config);
  const PreparedWeight b = prepare_block_scaled_weight(
      {interleaved.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}}, alternating);
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    EXPECT_EQ(static_cast<const float*>(a.view().global_scales.data)[expert],
              static_cast<const float*>(b.view().global_scales.data)[expert]);
    for (std::int64_t row = 0; row < kInner; ++row) {
      for (const auto& [from, to] : {std::pair(row, 2 * row), {kInner + row, 2 * row + 1}}) {
        EXPECT_EQ(row_bytes(a.view().codes, expert, from), row_bytes(b.view().codes, expert, to));
        EXPECT_EQ(row_bytes(a.view().scales, expert, from), row_bytes(b.view().scales, expert, to));
      }
    }
  }
}

TEST(PreparedWeightTest, RefillsInPlaceAndMovesWithItsAddresses) {
  const std::vector<BF16> first = random_values(kExperts * 2 * kInner * kColumns, 930);
  const std::vector<BF16> second = random_values(kExperts * 2 * kInner * kColumns, 931);
  const TensorView a{first.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}};
  const TensorView b{second.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}};
  for (const BlockScaledConfig& config : formats()) {
    PreparedWeight prepared = prepare_block_scaled_weight(a, config);
    const void* codes = prepared.view().codes.data;
    const void* scales = prepared.view().scales.data;
    refill_prepared_weight(b, prepared.view());
    PreparedWeight moved = std::move(prepared);
    EXPECT_EQ(moved.view().codes.data, codes);
    EXPECT_EQ(moved.view().scales.data, scales);
    const PreparedWeight fresh = prepare_block_scaled_weight(b, config);
    EXPECT_EQ(std::memcmp(codes, fresh.view().codes.data, fresh.view().codes.num_bytes()), 0);
    EXPECT_EQ(std::memcmp(scales, fresh.view().scales.data, fresh.view().scales.num_bytes()), 0);
  }
}

// reports: A65, A72: zeros have finite scales and factors; NaN and infinity stay in their block, or
// their expert.
TEST(PreparedWeightTest, ZerosAndWhatIsNoNumber) {
  std::vector<BF16> w(kExperts * 2 * kInner * kColumns, BF16{0});
  w[static_cast<std::size_t>(2 * kInner * kColumns + 40)] = BF16{0x7FC0};  // of expert 1
  for (const BlockScaledConfig& config : formats()) {
    const PreparedWeight prepared = prepare_block_scaled_weight(
        {w.data(), DType::kBF16, {kExperts, 2 * kInner, kColumns}}, config);
    const std::int64_t tile = config.inference ? 1 : 32;
    expect_codes(prepared.view(), w, every(1, 0, 2 * kInner), every(1, 0, 2 * kInner / tile));
    expect_error(outcome_of([&] { check_scales(prepared.view()); }), ErrorCode::kInvalidArgument,
                 {"scale [1, 0, ", config.format == Precision::kNVFP4 ? "byte 127" : "byte 255"});
  }
}

TEST(PreparedWeightTest, WhatAFormatCannotHoldIsRefusedWithTheValues) {
  const std::vector<BF16> w(64 * 96);
  const auto refused = [&](std::int64_t rows, std::int64_t columns, BlockScaledConfig config,
                           std::vector<std::string> words) {
    expect_error(outcome_of([&] {
                   prepare_block_scaled_weight({w.data(), DType::kBF16, {1, rows, columns}},
                                               config);
                 }),
                 ErrorCode::kInvalidArgument, words);
  };
  refused(64, 48, {Precision::kMXFP8, true}, {"48 columns", "mxfp8", "multiple of 32"});
  refused(40, 64, {Precision::kMXFP8, false}, {"40 rows", "mxfp8 training", "multiple of 32"});
  refused(64, 40, {Precision::kNVFP4, true}, {"40 columns", "nvfp4", "multiple of 16"});
  refused(64, 48, {Precision::kMXFP4, true}, {"48 columns", "mxfp4", "multiple of 32"});
  refused(96, 32, {Precision::kMXFP8, false, GateUpLayout::kInterleaved},
          {"96 rows", "interleaved", "multiple of 64"});
  refused(64, 64, {Precision::kNVFP4, false}, {"nvfp4", "inference is false"});
  expect_error(outcome_of([&] {
                 prepare_block_scaled_weight({w.data(), DType::kBF16, {1, 2, 16, 64}},
                                             {Precision::kMXFP8, false});
               }),
               ErrorCode::kInvalidArgument, {"halves of 16 rows", "multiple of 32"});
  refused(64, 64, {Precision::kBF16, true}, {"bf16", "legal are mxfp8, nvfp4 and mxfp4"});
  expect_error(outcome_of([&] {
                 prepare_block_scaled_weight({w.data(), DType::kF16, {1, 64, 64}},
                                             {Precision::kMXFP8, true});
               }),
               ErrorCode::kInvalidArgument, {"must be bf16", "f16 [1, 64, 64]"});
  const PreparedWeight prepared =
      prepare_block_scaled_weight({w.data(), DType::kBF16, {1, 64, 64}}, {Precision::kMXFP8, true});
  expect_error(outcome_of([&] {
                 refill_prepared_weight({w.data(), DType::kBF16, {1, 32, 64}}, prepared.view());
               }),
               ErrorCode::kInvalidArgument, {"codes", "[1, 32, 64]", "[1, 64, 64]"});
}

/// 2^58 bytes of codes, more than a process has addresses for.
TEST(PreparedWeightTest, NoMemoryIsAnErrorWithTheBytes) {
  constexpr std::int64_t kSide = std::int64_t{1} << 29;
  const BF16 first{0};
  const BlockScaledConfig config{Precision::kMXFP8, true};
  const std::string bytes = std::to_string(kSide * kSide / 32 * 33 + 128);
  expect_error(outcome_of([&] { const PreparedWeight weight(config, 1, kSide, kSide); }),
               ErrorCode::kOutOfMemory, {"a prepared weight", bytes});
  expect_error(outcome_of([&] {
                 prepare_block_scaled_weight({&first, DType::kBF16, {1, kSide, kSide}}, config);
               }),
               ErrorCode::kOutOfMemory, {"a prepared weight", bytes});
  expect_error(outcome_of([&] { const PreparedWeight weight(config, 1, -32, 64); }),
               ErrorCode::kInvalidArgument, {"[-32, 64]"});
}

}  // namespace
}  // namespace distmoe
