// SPDX-License-Identifier: Apache-2.0
//
// The JSON header of a safetensors file, read strictly and without a document tree: what the format
// does not allow ends the reading at once, so that memory stays in proportion to the file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.hpp"

namespace distmoe {

/// The limit of the format's reference implementation.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxStoredRank = 32;

/// One entry as written; nothing is checked but the grammar.
struct HeaderEntry {
  std::string name;
  std::string dtype_name;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< offsets into the data that follows the header
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<HeaderEntry> entries;  ///< in the order of the file
  Metadata metadata;
};

/// Throws io, with `label` and the reason.
SafetensorsHeader read_safetensors_header(std::string_view json, const std::string& label);

}  // namespace distmoe
