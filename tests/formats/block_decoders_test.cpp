// SPDX-License-Identifier: Apache-2.0
//
// Invariant: every set of decoders gives the bits of the plain loops, for every code under every
// scale, and writes nothing else.
#include "formats/block_decoders.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace distmoe {
namespace {

constexpr std::uint16_t kUntouched = 0x5AA5;

struct Set {
  const char* name;
  const BlockDecoders* (*decoders)();
};

class Decoders : public ::testing::TestWithParam<Set> {
 protected:
  void SetUp() override {
    if (set_ == nullptr) GTEST_SKIP() << "this processor has no " << GetParam().name;
  }
  /// Runs `decode(set, out)` with both sets and compares what they write and leave alone.
  template <typename Decode>
  void expect_same(std::size_t count, const Decode& decode) const {
    std::vector<BF16> expected(count + 40, BF16{kUntouched});
    std::vector<BF16> actual = expected;
    decode(plain_block_decoders(), expected.data());
    decode(*set_, actual.data());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(actual[i].bits, expected[i].bits) << i;
    }
    for (std::size_t i = count; i < actual.size(); ++i) {
      ASSERT_EQ(actual[i].bits, kUntouched) << i;
    }
  }
  const BlockDecoders* set_ = GetParam().decoders();
};
INSTANTIATE_TEST_SUITE_P(Sets, Decoders,
                         ::testing::Values(Set{"avx512", avx512_block_decoders},
                                           Set{"avx2", avx2_block_decoders}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(Decoders, GiveEveryE4M3UnderEveryScale) {
  std::vector<E4M3> codes(256);
  for (std::uint32_t i = 0; i < 256; ++i) codes[i].bits = static_cast<std::uint8_t>(i);
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    SCOPED_TRACE(byte);
    const std::vector<E8M0> scales(256, E8M0{static_cast<std::uint8_t>(byte)});
    expect_same(256, [&](const BlockDecoders& set, BF16* out) {
      set.e4m3_blocks(codes.data(), 8, scales.data(), out);
    });
    expect_same(250, [&](const BlockDecoders& set, BF16* out) {
      set.e4m3_columns(codes.data(), 250, scales.data(), out);
    });
  }
}

/// A block of one kind of code goes another way than one that has all kinds.
TEST_P(Decoders, GiveBlocksOfOneE4M3UnderEveryScale) {
  std::vector<E4M3> codes;
  for (std::uint32_t i = 0; i < 256; ++i) {
    codes.insert(codes.end(), 32, E4M3{static_cast<std::uint8_t>(i)});
  }
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    SCOPED_TRACE(byte);
    const std::vector<E8M0> scales(codes.size(), E8M0{static_cast<std::uint8_t>(byte)});
    expect_same(codes.size(), [&](const BlockDecoders& set, BF16* out) {
      set.e4m3_blocks(codes.data(), 256, scales.data(), out);
    });
    expect_same(codes.size(), [&](const BlockDecoders& set, BF16* out) {
      set.e4m3_columns(codes.data(), static_cast<std::int64_t>(codes.size()), scales.data(), out);
    });
  }
}

TEST_P(Decoders, UseTheScaleOfEachBlockAndColumn) {
  std::vector<E4M3> codes(320);
  std::vector<E8M0> scales(320);
  for (std::uint32_t i = 0; i < 320; ++i) {
    codes[i].bits = static_cast<std::uint8_t>(i * 89);
    scales[i].bits = static_cast<std::uint8_t>(i < 256 ? i : 100 + i % 40);
  }
  expect_same(320, [&](const BlockDecoders& set, BF16* out) {
    set.e4m3_blocks(codes.data(), 10, scales.data() + 5, out);
  });
  for (const std::int64_t count : {0, 1, 31, 32, 33, 319, 320}) {
    expect_same(static_cast<std::size_t>(count), [&](const BlockDecoders& set, BF16* out) {
      set.e4m3_columns(codes.data(), count, scales.data(), out);
    });
  }
}

TEST_P(Decoders, GiveEveryE2M1UnderEveryScale) {
  constexpr std::int64_t kBlocks = 256;
  std::vector<std::uint8_t> codes(kBlocks * 16);
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<std::uint8_t>(i * 7 + i / 16);
  std::vector<E4M3> fp8(kBlocks);
  std::vector<E8M0> powers(kBlocks);
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    fp8[i].bits = powers[i].bits = static_cast<std::uint8_t>(i);
  }
  for (const std::int64_t blocks : {0, 1, 3, 256}) {
    expect_same(static_cast<std::size_t>(blocks * 16), [&](const BlockDecoders& set, BF16* out) {
      set.nvfp4_blocks(codes.data(), blocks, fp8.data(), out);
    });
    expect_same(static_cast<std::size_t>(blocks * 32), [&](const BlockDecoders& set, BF16* out) {
      set.mxfp4_blocks(codes.data(), blocks, powers.data(), out);
    });
  }
}

}  // namespace
}  // namespace distmoe
