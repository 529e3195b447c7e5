// SPDX-License-Identifier: Apache-2.0
#include "io/quote.hpp"

#include <cstddef>

namespace distmoe {

std::string quote(std::string_view name) {
  constexpr std::size_t kMaxLength = 200;
  constexpr std::string_view kHexDigits = "0123456789abcdef";
  std::string text = "'";
  for (const char c : name.substr(0, kMaxLength)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F || byte == '\\' || byte == '\'') {
      text += "\\x";
      text += kHexDigits[byte >> 4];
      text += kHexDigits[byte & 15];
    } else {
      text += c;
    }
  }
  if (name.size() > kMaxLength) text += "...";
  return text += '\'';
}

}  // namespace distmoe
