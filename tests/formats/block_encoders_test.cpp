// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every set of encoders gives the bits of the plain loops, for every value under every
// scale, and writes nothing else.
#include "formats/block_encoders.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/raw_values.hpp"

namespace distmoe {
namespace {

constexpr std::uint8_t kUntouched = 0xA5;

std::vector<BF16> every_value() {
  std::vector<BF16> values;
  values.reserve(0x10000);
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    values.push_back(BF16{static_cast<std::uint16_t>(bits)});
  }
  return values;
}

bool is_finite(BF16 value) { return magnitude_bits(value) < 0x7F80; }

/// What quantisers ask of E2M1's encoders: a multiplier brings its block to at most 6 or so.
bool is_asked_for(BF16 value, float multiplier) {
  return std::fabs(to_float(value) * multiplier) < 0x1p100f;
}

/// What no quantiser asks for, because the amax of the block forbids it, is not compared.
void expect_e4m3(const std::vector<BF16>& values, const std::vector<E4M3>& actual,
                 const std::vector<E4M3>& expected, int byte) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (byte != 255 && !is_finite(values[i])) continue;
    ASSERT_EQ(actual[i].bits, expected[i].bits) << to_float(values[i]) << " under " << byte;
  }
}

struct Set {
  const char* name;
  const BlockEncoders* (*encoders)();
};

class Encoders : public ::testing::TestWithParam<Set> {
 protected:
  void SetUp() override {
    if (set_ == nullptr) GTEST_SKIP() << "this processor has no " << GetParam().name;
  }
  const BlockEncoders& plain_ = plain_block_encoders();
  const BlockEncoders* set_ = GetParam().encoders();
};
INSTANTIATE_TEST_SUITE_P(Sets, Encoders,
                         ::testing::Values(Set{"avx512", avx512_block_encoders},
                                           Set{"avx2", avx2_block_encoders}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(Encoders, GiveEveryE4M3CodeUnderEveryScale) {
  const std::vector<BF16> values = every_value();
  const auto num_blocks = static_cast<std::int64_t>(values.size() / 32);
  const auto count = static_cast<std::int64_t>(values.size());
  for (int byte = 0; byte < 256; ++byte) {
    const std::vector<E8M0> scales(values.size(), E8M0{static_cast<std::uint8_t>(byte)});
    std::vector<E4M3> expected(values.size());
    std::vector<E4M3> blocks(values.size());
    std::vector<E4M3> columns(values.size());
    plain_.e4m3_columns(values.data(), count, scales.data(), expected.data());
    set_->e4m3_blocks(values.data(), num_blocks, scales.data(), blocks.data());
    set_->e4m3_columns(values.data(), count, scales.data(), columns.data());
    expect_e4m3(values, blocks, expected, byte);
    expect_e4m3(values, columns, expected, byte);
    const RowsToEncode rows{values.data(), count / 8, 8, columns.data(), count / 8};
    std::fill(columns.begin(), columns.end(), E4M3{kUntouched});
    set_->e4m3_rows(rows, count / 8, scales.data());
    expect_e4m3(values, columns, expected, byte);
    plain_.e4m3_blocks(values.data(), num_blocks, scales.data(), blocks.data());
    expect_e4m3(values, blocks, expected, byte);
  }
}

TEST_P(Encoders, GiveEveryE2M1CodeUnderManyMultipliers) {
  const std::vector<BF16> values = every_value();
  for (const float multiplier : {1.0f, 0x1p-126f, 0x1p127f, 0.37f, 5.999999f, 1.0f / 3.0f, 2688.0f,
                                 7.9e-36f, 1.1754944e-38f, 2.688e15f}) {
    for (const std::int64_t block : {16, 32}) {
      const auto num_blocks = static_cast<std::int64_t>(values.size()) / block;
      const std::vector<float> multipliers(static_cast<std::size_t>(num_blocks), multiplier);
      std::vector<std::uint8_t> expected(values.size() / 2);
      std::vector<std::uint8_t> actual(values.size() / 2);
      const auto run = [&](const BlockEncoders& encoders, std::uint8_t* codes) {
        (block == 16 ? encoders.e2m1_blocks16 : encoders.e2m1_blocks32)(values.data(), num_blocks,
                                                                        multipliers.data(), codes);
      };
      run(plain_, expected.data());
      run(*set_, actual.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (is_asked_for(values[i], multiplier)) {
          ASSERT_EQ(actual[i / 2] >> i % 2 * 4 & 0xF, expected[i / 2] >> i % 2 * 4 & 0xF)
              << to_float(values[i]) << " * " << multiplier;
        }
      }
    }
  }
}

// Ties and their FP32 neighbours: the product decides, not the BF16.
TEST_P(Encoders, RoundE2M1TiesAlike) {
  for (const float tie : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
    for (const float multiplier : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, 9.0f)}) {
      const std::vector<BF16> ones(16, to_bf16(-1.0f));
      std::vector<std::uint8_t> expected(8);
      std::vector<std::uint8_t> actual(8);
      plain_.e2m1_blocks16(ones.data(), 1, &multiplier, expected.data());
      set_->e2m1_blocks16(ones.data(), 1, &multiplier, actual.data());
      EXPECT_EQ(actual, expected) << std::hexfloat << multiplier;
      EXPECT_EQ(actual[0] & 0xF, to_e2m1(-multiplier).bits) << std::hexfloat << multiplier;
    }
  }
}

// Of every amax, under factors of rows from the smallest amax to the largest, and those of others.
TEST_P(Encoders, FindTheSameScalesOfNvfp4) {
  std::vector<BF16> amax;
  for (const BF16 value : every_value()) {
    if (is_finite(value) && value.bits == magnitude_bits(value)) amax.push_back(value);
  }
  const auto count = static_cast<std::int64_t>(amax.size());
  for (const float row_amax :
       {0.0f, 1e-30f, 1e-8f, 1e-3f, 0.4f, 1.0f, 3.14159f, 100.3f, 2688.0f, 1e10f, 3.3e38f}) {
    const float factor = nvfp4_factor(row_amax, kNvfp4RowFloor);
    std::vector<E4M3> scales[2];
    std::vector<float> multipliers[2];
    const BlockEncoders* sets[] = {&plain_, set_};
    for (int i = 0; i < 2; ++i) {
      scales[i].resize(amax.size());
      multipliers[i].resize(amax.size());
      sets[i]->nvfp4_scales(amax.data(), count, factor, scales[i].data(), multipliers[i].data());
    }
    for (std::size_t i = 0; i < amax.size(); ++i) {
      const E4M3 scale = nvfp4_scale(to_float(amax[i]), factor);
      ASSERT_EQ(scales[0][i].bits, scale.bits) << to_float(amax[i]) << " by " << factor;
      ASSERT_EQ(scales[1][i].bits, scale.bits) << to_float(amax[i]) << " by " << factor;
      ASSERT_EQ(multipliers[0][i], nvfp4_multiplier(factor, scale)) << to_float(amax[i]);
      ASSERT_EQ(multipliers[1][i], multipliers[0][i]) << to_float(amax[i]) << " by " << factor;
    }
  }
}

TEST_P(Encoders, FindTheSameAmaxNaNIncluded) {
  const testing::RawMatrix matrix = testing::poisoned_values(1, 32 * 500, 8, 60);
  const testing::StridedRows rows(matrix, matrix.cols);
  for (const std::int64_t block : {16, 32}) {
    std::vector<BF16> found[2];
    const BlockEncoders* sets[] = {&plain_, set_};
    for (int i = 0; i < 2; ++i) {
      found[i].resize(static_cast<std::size_t>(matrix.cols / block));
      (block == 16 ? sets[i]->amax_blocks16 : sets[i]->amax_blocks32)(
          rows.view().data, matrix.cols / block, found[i].data());
    }
    for (std::int64_t i = 0; i < matrix.cols / block; ++i) {
      const auto amax = testing::oracle_amax(matrix, 0, 1, i * block, (i + 1) * block);
      const BF16 plain = found[0][static_cast<std::size_t>(i)];
      ASSERT_EQ(plain.bits, found[1][static_cast<std::size_t>(i)].bits) << i;
      ASSERT_EQ(std::isnan(amax), std::isnan(to_float(plain))) << i;
      if (std::isnan(amax)) continue;
      ASSERT_EQ(static_cast<double>(to_float(plain)), amax) << i;
    }
  }
}

TEST_P(Encoders, TreatEveryBlockAndColumnByItsOwnScaleAndStopAtTheEnd) {
  for (const std::int64_t count : {0, 1, 31, 32, 33, 63, 95, 250}) {
    const testing::RawMatrix matrix =
        testing::finite_values(1, 256, static_cast<std::uint32_t>(count));
    const testing::StridedRows rows(matrix, 256);
    std::vector<E8M0> scales;
    std::vector<float> multipliers;
    for (int i = 0; i < 256; ++i) {
      scales.push_back(E8M0{static_cast<std::uint8_t>(i * 37 % 254 == 77 ? 255 : 110 + i % 30)});
      multipliers.push_back(std::ldexp(1.0f + static_cast<float>(i) / 300.0f, i % 12 - 6));
    }
    const auto is_compared = [&](std::size_t byte) {
      const std::size_t block = byte < 300 ? 16 : 32;
      const std::size_t element = byte % 300 * 2;
      if (element >= 256) return true;  // untouched
      const float multiplier = multipliers[element / block];
      return is_asked_for(rows.view().data[element], multiplier) &&
             is_asked_for(rows.view().data[element + 1], multiplier);
    };
    std::vector<E4M3> codes[2];
    std::vector<std::uint8_t> packed[2];
    std::vector<E4M3> nvfp4_scales[2];
    std::vector<float> nvfp4_multipliers[2];
    const BlockEncoders* sets[] = {&plain_, set_};
    for (int i = 0; i < 2; ++i) {
      codes[i].resize(1200, E4M3{kUntouched});
      packed[i].resize(600, kUntouched);
      sets[i]->e4m3_columns(rows.view().data, count, scales.data(), codes[i].data());
      sets[i]->e4m3_blocks(rows.view().data, count / 32, scales.data(), codes[i].data() + 300);
      sets[i]->e4m3_rows({rows.view().data, 3, 2, codes[i].data() + 600, 260}, count,
                         scales.data());
      sets[i]->e2m1_blocks16(rows.view().data, count / 16, multipliers.data(), packed[i].data());
      sets[i]->e2m1_blocks32(rows.view().data, count / 32, multipliers.data(),
                             packed[i].data() + 300);
      nvfp4_scales[i].resize(300, E4M3{kUntouched});
      nvfp4_multipliers[i].resize(300, -1.0f);
      const std::vector<BF16> amax(static_cast<std::size_t>(count), to_bf16(3.0f));
      sets[i]->nvfp4_scales(amax.data(), count, 5.0f, nvfp4_scales[i].data(),
                            nvfp4_multipliers[i].data());
    }
    EXPECT_EQ(nvfp4_multipliers[0], nvfp4_multipliers[1]) << count;
    EXPECT_EQ(nvfp4_scales[1][static_cast<std::size_t>(count)].bits, kUntouched) << count;
    for (std::size_t i = 0; i < 1200; ++i) {
      ASSERT_EQ(codes[0][i].bits, codes[1][i].bits) << count << ' ' << i;
    }
    for (std::size_t i = 0; i < 600; ++i) {
      if (is_compared(i)) {
        ASSERT_EQ(packed[0][i], packed[1][i]) << count << ' ' << i;
      }
    }
    EXPECT_EQ(codes[1][static_cast<std::size_t>(count)].bits, kUntouched) << count;
    EXPECT_EQ(packed[1][static_cast<std::size_t>(count / 16 * 8)], kUntouched) << count;
  }
}

}  // namespace
}  // namespace distmoe
