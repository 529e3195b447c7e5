// SPDX-License-Identifier: Apache-2.0
#include "plan/byte_text.hpp"

#include <array>
#include <cstdio>

namespace distmoe {

std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first_digit = value < 0 ? 1 : 0;
  for (std::size_t end = text.size(); end > first_digit + 3; end -= 3) text.insert(end - 3, ",");
  return text;
}

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // NOTE: 1023.995 prints as 1024.00, so the next unit starts there.
  while (value >= 1023.995 && unit + 1 < kUnits.size()) value /= 1024.0, ++unit;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text.data();
}

std::string exact_and_human_bytes(std::int64_t bytes) {
  const std::string exact = grouped(bytes) + " B";
  return bytes < 1024 ? exact : exact + " (" + human_bytes(bytes) + ")";
}

}  // namespace distmoe
