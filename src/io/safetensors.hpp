// SPDX-License-Identifier: Apache-2.0
//
// safetensors: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without
// a gap. Files come from anywhere, so the reader trusts nothing: see docs/checkpoints.md for what
// is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distmoe/tensor.hpp"
#include "io/mapped_file.hpp"

namespace distmoe {

/// One tensor of a file. `data` may be aligned to nothing: the format aligns no tensor.
struct StoredTensor {
  std::string name;
  std::string dtype_name;      ///< as the file spells it: "BF16", "F8_E4M3", "I8"
  std::optional<DType> dtype;  ///< empty where distmoe has no such type
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;

  /// The type of a tensor that was checked to have one of ours; throws internal otherwise.
  DType known_dtype() const;
  /// "BF16 [8, 192, 384]".
  std::string describe() const;
};

using Metadata = std::map<std::string, std::string>;

/// What the header of a file says; the tensors are sorted by name.
struct SafetensorsContents {
  std::vector<StoredTensor> tensors;
  Metadata metadata;
};

/// Reads the header at the start of `file_bytes`; the result refers to them. `label` names the file
/// in errors. Throws io for whatever is no well-formed file.
SafetensorsContents parse_safetensors(std::span<const std::byte> file_bytes,
                                      const std::string& label);

/// A memory-mapped file. Movable; tensors stay valid (and where they are) as long as it lives.
class SafetensorsFile {
 public:
  /// Throws io for a file that cannot be read or is not well formed.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  const Metadata& metadata() const noexcept { return contents_.metadata; }
  /// Sorted by name.
  std::span<const StoredTensor> tensors() const noexcept { return contents_.tensors; }
  /// Null where the file has no such tensor.
  const StoredTensor* find(std::string_view name) const noexcept;

 private:
  SafetensorsFile(std::filesystem::path path, MappedFile mapping);

  std::filesystem::path path_;
  MappedFile mapping_;
  SafetensorsContents contents_;
};

}  // namespace distmoe
