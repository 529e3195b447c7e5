// SPDX-License-Identifier: Apache-2.0
#include "option_values.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

/// NaN where the text is no finite number.
double finite_or_nan(std::string_view text) {
  double value = 0.0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto parsed = std::from_chars(begin, end, value);
  const bool is_finite = parsed.ec == std::errc() && parsed.ptr == end && std::isfinite(value);
  return is_finite ? value : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t low,
                           std::int64_t high) {
  std::int64_t value = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto parsed = std::from_chars(begin, end, value);
  const bool is_legal =
      parsed.ec == std::errc() && parsed.ptr == end && value >= low && value <= high;
  DISTMOE_CHECK(is_legal, kInvalidArgument, option, " is '", text, "'; legal: an integer ", low,
                "..", high);
  return value;
}

double parse_real(std::string_view option, std::string_view text, Zero zero) {
  const double value = finite_or_nan(text);
  const bool is_legal = value > 0.0 || (value == 0.0 && zero == Zero::kLegal);
  DISTMOE_CHECK(is_legal, kInvalidArgument, option, " is '", text, "'; legal: a finite number ",
                zero == Zero::kLegal ? ">= 0" : "> 0");
  return value;
}

double parse_finite(std::string_view option, std::string_view text) {
  const double value = finite_or_nan(text);
  DISTMOE_CHECK(!std::isnan(value), kInvalidArgument, option, " is '", text,
                "'; legal: a finite number");
  return value;
}

std::filesystem::path parse_path(std::string_view option, std::string_view text) {
  DISTMOE_CHECK(!text.empty(), kInvalidArgument, option, " is empty; legal: a path");
  return text;
}

std::vector<std::int64_t> parse_token_counts(std::string_view option, std::string_view text,
                                             int max_entries) {
  const auto num_entries = std::count(text.begin(), text.end(), ',') + 1;
  DISTMOE_CHECK(num_entries <= max_entries, kInvalidArgument, option, " has ", num_entries,
                " entries; legal: 1..", max_entries, ", one a rank");
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int64_t> counts;
  std::int64_t sum = 0;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    counts.push_back(parse_integer(option, text.substr(begin, comma - begin), 0, kLargest));
    DISTMOE_CHECK(!__builtin_add_overflow(sum, counts.back(), &sum), kInvalidArgument, option,
                  " adds up to more than ", kLargest, " tokens");
    begin = comma + 1;
  }
  return counts;
}

int parse_name(std::string_view option, std::string_view text,
               const std::vector<std::string_view>& names) {
  std::string legal;
  for (std::size_t index = 0; index < names.size(); ++index) {
    if (names[index] == text) return static_cast<int>(index);
    legal += (index == 0 ? "" : " or ") + std::string(names[index]);
  }
  throw_error(ErrorCode::kInvalidArgument, concat(option, " is '", text, "'; legal: ", legal));
}

}  // namespace distmoe::tools
