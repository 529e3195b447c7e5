// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace distmoe {

/// A regular file mapped read-only. The pages belong to the page cache: a byte that nobody reads
/// costs no memory. A file that another process truncates while it is mapped ends in SIGBUS, as for
/// every memory map; replace files by rename.
class MappedFile {
 public:
  /// Throws io, naming the path and the reason of the system.
  static MappedFile open(const std::filesystem::path& path);

  MappedFile() = default;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  /// Valid as long as this object; moving it does not move the bytes.
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace distmoe
