// SPDX-License-Identifier: Apache-2.0
//
// Compares codes or scales that lie in memory with gaps between their rows.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace distmoe::testing {

/// Rows of bytes with kGap bytes behind each, which nobody may write.
template <typename Byte>
class GappedBytes {
 public:
  GappedBytes(std::int64_t rows, std::int64_t cols)
      : cols_(cols), bytes_(static_cast<std::size_t>(rows * (cols + kGap)), Byte{kUntouched}) {}

  Byte* data() { return bytes_.data(); }
  std::int64_t stride() const { return cols_ + kGap; }

  /// `expected` has no gaps.
  void expect(const std::vector<std::uint8_t>& expected, const char* what) const {
    ASSERT_EQ(expected.size() + bytes_.size() / static_cast<std::size_t>(stride()) * kGap,
              bytes_.size());
    auto next = expected.begin();
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / stride();
      const auto col = static_cast<std::int64_t>(i) % stride();
      const int wanted = col < cols_ ? *next++ : kUntouched;
      ASSERT_EQ(bits_of(bytes_[i]), wanted) << what << ' ' << row << ", " << col;
    }
  }

 private:
  static constexpr std::int64_t kGap = 3;
  static constexpr std::uint8_t kUntouched = 0xA5;
  static int bits_of(std::uint8_t byte) { return byte; }
  template <typename Number>
  static int bits_of(Number number) {
    return number.bits;
  }

  std::int64_t cols_;
  std::vector<Byte> bytes_;
};

/// Two 4-bit codes a byte, the first in the low nibble, each row from a byte of its own.
inline std::vector<std::uint8_t> packed(const std::vector<std::uint8_t>& codes, std::int64_t cols) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::size_t col = i % static_cast<std::size_t>(cols);
    if (col % 2 == 0) {
      bytes.push_back(codes[i]);
    } else {
      bytes.back() = static_cast<std::uint8_t>(bytes.back() | codes[i] << 4);
    }
  }
  return bytes;
}

}  // namespace distmoe::testing
