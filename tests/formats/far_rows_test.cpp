// SPDX-License-Identifier: Apache-2.0
//
// Invariant: quantisers and decoders form the addresses of values, codes and scales in 64 bits:
// rows beyond 2^32 elements are read and written where their stride says.
#include <gtest/gtest.h>

#include <cstring>

#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "formats/raw_values.hpp"
#include "formats/sparse_memory.hpp"

namespace distmoe {
namespace {

using testing::SparseMemory;

// Two blocks of 32 rows, of which the last row lies beyond 2^32 elements.
constexpr std::int64_t kRows = 34;
constexpr std::int64_t kCols = 48;
constexpr std::int64_t kFar = (std::int64_t{1} << 27) + 4096;
static_assert((kRows - 1) * kFar > std::int64_t{1} << 32);

/// Values, codes and scales of kRows rows, near to each other or far apart.
template <typename Code, typename Scale>
struct Matrix {
  explicit Matrix(std::int64_t row_stride)
      : stride(row_stride),
        values(static_cast<std::size_t>(kRows * stride) * sizeof(BF16)),
        codes(static_cast<std::size_t>(kRows * stride)),
        scales(static_cast<std::size_t>(kRows * stride)),
        decoded(static_cast<std::size_t>(kRows * stride) * sizeof(BF16)) {
    const testing::RawMatrix matrix = testing::finite_values(kRows, kCols, 15);
    if (!is_given()) return;
    for (std::int64_t row = 0; row < kRows; ++row) {
      std::memcpy(values.as<BF16>() + row * stride,
                  &matrix.bits[static_cast<std::size_t>(row * kCols)], kCols * sizeof(BF16));
    }
  }
  bool is_given() const {
    return values.is_given() && codes.is_given() && scales.is_given() && decoded.is_given();
  }
  BF16Rows rows() const { return {values.as<BF16>(), kRows, kCols, stride}; }
  BlockScaledView<Code, Scale> view() const {
    return {codes.as<Code>(), scales.as<Scale>(), stride, stride};
  }
  DecodedRows<BF16> out() const { return {decoded.as<BF16>(), kRows, kCols, stride}; }

  std::int64_t stride;
  SparseMemory values, codes, scales, decoded;
};

/// Quantises and decodes near and far. `code_bytes` and `scale_bytes` of a row, `scale_rows` of
/// them.
template <typename Code, typename Scale, typename Run>
void expect_alike(std::int64_t code_bytes, std::int64_t scale_rows, std::int64_t scale_bytes,
                  const Run& run) {
  const Matrix<Code, Scale> near(64);
  const Matrix<Code, Scale> far(kFar);
  if (!far.is_given()) GTEST_SKIP() << "this machine gives no 30 GiB of address space";
  run(near);
  run(far);
  const auto same = [&](const SparseMemory& a, const SparseMemory& b, std::int64_t row,
                        std::int64_t element, std::int64_t count) {
    return std::memcmp(a.as<std::byte>() + row * near.stride * element,
                       b.as<std::byte>() + row * far.stride * element,
                       static_cast<std::size_t>(count * element)) == 0;
  };
  for (std::int64_t row = 0; row < kRows; ++row) {
    EXPECT_TRUE(same(near.codes, far.codes, row, 1, code_bytes)) << row;
    EXPECT_TRUE(same(near.decoded, far.decoded, row, sizeof(BF16), kCols)) << row;
    if (row < scale_rows) {
      EXPECT_TRUE(same(near.scales, far.scales, row, 1, scale_bytes)) << row;
    }
  }
  // Not because nothing was written.
  EXPECT_NE(far.decoded.template as<BF16>()[(kRows - 1) * kFar + 40].bits, 0);
}

// reports: A77, A78: the stages that quantise
TEST(FarRows, OfMxfp8AreQuantisedAndDecodedInEveryDirection) {
  expect_alike<E4M3, E8M0>(kCols, kRows, 2, [](const auto& m) {
    quantise_mxfp8_rows(m.rows(), m.view());
    decode_mxfp8(m.view(), BlockShape::kRows, m.out());
  });
  expect_alike<E4M3, E8M0>(kCols, 2, kCols, [](const auto& m) {
    quantise_mxfp8_columns(m.rows(), m.view());
    decode_mxfp8(m.view(), BlockShape::kColumns, m.out());
  });
  expect_alike<E4M3, E8M0>(kCols, 2, 2, [](const auto& m) {
    quantise_mxfp8_tiles(m.rows(), m.view());
    decode_mxfp8(m.view(), BlockShape::kTiles, m.out());
  });
}

TEST(FarRows, OfFourBitFormatsAreQuantisedAndDecoded) {
  expect_alike<std::uint8_t, E8M0>(kCols / 2, kRows, 2, [](const auto& m) {
    quantise_mxfp4(m.rows(), m.view());
    decode_mxfp4(m.view(), m.out());
  });
  expect_alike<std::uint8_t, E4M3>(kCols / 2, kRows, 3, [](const auto& m) {
    std::vector<float> factors(kRows);
    quantise_nvfp4_rows(m.rows(), m.view(), factors.data());
    decode_nvfp4(m.view(), m.out());
  });
  expect_alike<std::uint8_t, E4M3>(kCols / 2, kRows, 3, [](const auto& m) {
    quantise_nvfp4_expert(m.rows(), amax_of(m.rows()), m.view());
    decode_nvfp4(m.view(), m.out());
  });
}

}  // namespace
}  // namespace distmoe
