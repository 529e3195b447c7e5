// SPDX-License-Identifier: Apache-2.0
//
// A file that appears under its name when it is complete, or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace distmoe {

class AtomicFile {
 public:
  /// What committing to `path` replaces: where it is a link, what the link leads to, which need not
  /// exist, rather than the link.
  static std::filesystem::path target_of(const std::filesystem::path& path);

  /// Whether `file` has a name that a temporary file for `path` gets: what a process leaves behind
  /// that was killed.
  static bool is_temporary_of(const std::filesystem::path& path, const std::filesystem::path& file);
  /// Removes such a file unless a process still writes it; whether it is gone.
  static bool remove_abandoned(const std::filesystem::path& temporary);

  /// Creates a temporary file beside the target. Throws io, also where the target exists and is no
  /// regular file: renaming would replace a device.
  explicit AtomicFile(const std::filesystem::path& path);
  /// Removes the temporary file unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Throws io. A process that ignores SIGXFSZ gets io beyond its file-size limit as well.
  void write(std::span<const std::byte> bytes);
  /// Brings the bytes to the disk and renames. Throws io. Nothing may be written afterwards.
  void commit();

 private:
  [[noreturn]] void refuse(const char* action) const;

  std::filesystem::path target_;
  std::filesystem::path temporary_;
  int descriptor_;
  bool is_committed_ = false;
};

}  // namespace distmoe
