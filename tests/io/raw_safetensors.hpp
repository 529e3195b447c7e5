// SPDX-License-Identifier: Apache-2.0
//
// Files put together byte by byte, so that tests of the reader do not rest on our writer.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace distmoe::testing {

/// Header length, header and data; `length` differs from the header's in hostile files.
inline std::string raw_safetensors(std::string_view header, std::string_view data,
                                   std::uint64_t length) {
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data);
}

inline std::string raw_safetensors(std::string_view header, std::string_view data) {
  return raw_safetensors(header, data, header.size());
}

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace distmoe::testing
