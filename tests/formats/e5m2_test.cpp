// SPDX-License-Identifier: Apache-2.0
//
// Invariant: E5M2 has 248 finite codes (two of them zeros), two infinities and six NaN; encoding is
// to nearest, ties to even, and saturates at 57344.
#include "formats/e5m2.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/nearest_oracle.hpp"

namespace distmoe {
namespace {

// Codes 0x00 to 0x7B in units of 2^-16, written out: four codes a binade.
const std::vector<double> kUnits = {
    0,          1,          2,          3,          4,          5,          6,          7,
    8,          10,         12,         14,         16,         20,         24,         28,
    32,         40,         48,         56,         64,         80,         96,         112,
    128,        160,        192,        224,        256,        320,        384,        448,
    512,        640,        768,        896,        1024,       1280,       1536,       1792,
    2048,       2560,       3072,       3584,       4096,       5120,       6144,       7168,
    8192,       10240,      12288,      14336,      16384,      20480,      24576,      28672,
    32768,      40960,      49152,      57344,      65536,      81920,      98304,      114688,
    131072,     163840,     196608,     229376,     262144,     327680,     393216,     458752,
    524288,     655360,     786432,     917504,     1048576,    1310720,    1572864,    1835008,
    2097152,    2621440,    3145728,    3670016,    4194304,    5242880,    6291456,    7340032,
    8388608,    10485760,   12582912,   14680064,   16777216,   20971520,   25165824,   29360128,
    33554432,   41943040,   50331648,   58720256,   67108864,   83886080,   100663296,  117440512,
    134217728,  167772160,  201326592,  234881024,  268435456,  335544320,  402653184,  469762048,
    536870912,  671088640,  805306368,  939524096,  1073741824, 1342177280, 1610612736, 1879048192,
    2147483648, 2684354560, 3221225472, 3758096384,
};

std::vector<double> values() {
  std::vector<double> scaled = kUnits;
  for (double& value : scaled) value *= 0x1p-16;
  return scaled;
}
const std::vector<double> kValues = values();

TEST(E5M2, DecodesEveryCodeToTheTable) {
  ASSERT_EQ(kValues.size(), 0x7Cu);
  EXPECT_EQ(kValues.back(), static_cast<double>(kE5M2Max));
  for (std::uint32_t code = 0; code < 0x7C; ++code) {
    const float positive = to_float(E5M2{static_cast<std::uint8_t>(code)});
    const float negative = to_float(E5M2{static_cast<std::uint8_t>(code | 0x80u)});
    EXPECT_EQ(static_cast<double>(positive), kValues[code]) << code;
    EXPECT_EQ(static_cast<double>(negative), -kValues[code]) << code;
    EXPECT_TRUE(std::signbit(negative)) << code;
    EXPECT_EQ(to_e5m2(positive).bits, code);
    EXPECT_EQ(to_e5m2(negative).bits, code | 0x80u);
  }
  EXPECT_EQ(to_float(E5M2{0x7C}), std::numeric_limits<float>::infinity());
  EXPECT_EQ(to_float(E5M2{0xFC}), -std::numeric_limits<float>::infinity());
  for (const int code : {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}) {
    EXPECT_TRUE(std::isnan(to_float(E5M2{static_cast<std::uint8_t>(code)}))) << code;
  }
}

TEST(E5M2, EncodesEveryBF16AsTheOracleDoes) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = to_float(BF16{static_cast<std::uint16_t>(bits)});
    const std::uint32_t sign = bits >> 8 & 0x80u;
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), 1e6);
    const std::uint32_t code = std::isnan(value) ? 0x7F : testing::nearest_code(kValues, magnitude);
    ASSERT_EQ(to_e5m2(value).bits, sign | code) << std::hexfloat << value;
  }
}

TEST(E5M2, RoundsTiesToEvenAndTheirNeighboursToNearest) {
  for (std::uint32_t code = 0; code + 1 < kValues.size(); ++code) {
    const auto tie = static_cast<float>((kValues[code] + kValues[code + 1]) / 2);
    EXPECT_EQ(to_e5m2(tie).bits, code + code % 2) << tie;
    EXPECT_EQ(to_e5m2(-tie).bits, (code + code % 2) | 0x80u) << tie;
    EXPECT_EQ(to_e5m2(std::nextafter(tie, 0.0f)).bits, code) << tie;
    EXPECT_EQ(to_e5m2(std::nextafter(tie, 1e9f)).bits, code + 1) << tie;
  }
}

// reports: A62
TEST(E5M2, SaturatesAndKeepsNaNAndTheSignOfZero) {
  for (const float value : {57344.f, 61440.f, 65536.f, 1e30f, INFINITY}) {
    EXPECT_EQ(to_float(to_e5m2(value)), kE5M2Max) << value;
    EXPECT_EQ(to_float(to_e5m2(-value)), -kE5M2Max) << value;
  }
  EXPECT_EQ(to_e5m2(std::numeric_limits<float>::quiet_NaN()).bits, 0x7F);
  EXPECT_EQ(to_e5m2(-std::numeric_limits<float>::quiet_NaN()).bits, 0xFF);
  EXPECT_EQ(to_e5m2(-0.0f).bits, 0x80);
  EXPECT_EQ(to_e5m2(-0x1p-149f).bits, 0x80);
}

}  // namespace
}  // namespace distmoe
