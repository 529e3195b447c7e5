// SPDX-License-Identifier: Apache-2.0
//
// The output tensor `y`, written piece by piece as safetensors, so that the first rank never holds
// the tokens of all ranks. The file appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace distmoe::tools {

class OutputFile {
 public:
  /// Throws invalid_argument where `path` cannot become an output: no such folder, not writable,
  /// something else than a regular file (renaming would replace a device), or one of `inputs`.
  static void check_destination(const std::filesystem::path& path,
                                const std::vector<std::filesystem::path>& inputs);

  /// Opens a temporary file beside `path` for `y` BF16 [num_tokens, hidden_dim]. Throws io.
  OutputFile(const std::filesystem::path& path, std::int64_t num_tokens, std::int64_t hidden_dim);
  /// Removes the temporary file unless it was committed.
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// The next bytes of y in row order. Throws io.
  void append(std::span<const std::byte> bytes);
  /// Closes and renames. Throws io, also where bytes are missing.
  void commit();

 private:
  void write(const void* data, std::size_t num_bytes);

  std::filesystem::path path_;
  std::filesystem::path temporary_path_;
  std::int64_t missing_bytes_;
  int descriptor_ = -1;
};

}  // namespace distmoe::tools
