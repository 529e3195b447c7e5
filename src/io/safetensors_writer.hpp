// SPDX-License-Identifier: Apache-2.0
//
// Writes a safetensors file piece by piece, so that nobody has to hold all of it. The file appears
// under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "distmoe/tensor.hpp"
#include "io/atomic_file.hpp"
#include "io/safetensors.hpp"

namespace distmoe {

/// What the header says of a tensor.
struct TensorEntry {
  std::string name;
  DType dtype = DType::kBF16;
  std::vector<std::int64_t> shape;
};

class SafetensorsWriter {
 public:
  /// Opens a temporary file beside `path` and writes the header. The names are distinct, in UTF-8
  /// and not __metadata__. Throws io, invalid_argument where the bytes exceed 64 bits.
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorEntry> tensors,
                    const Metadata& metadata = {});

  /// The next bytes of the tensors, which follow each other in the order of the header. Throws io.
  void append(std::span<const std::byte> bytes);
  /// The file appears. Throws io, and internal unless all bytes were appended.
  void commit();

 private:
  AtomicFile file_;
  std::filesystem::path path_;
  std::int64_t missing_bytes_ = 0;
};

}  // namespace distmoe
