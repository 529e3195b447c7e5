// SPDX-License-Identifier: Apache-2.0
#include "destination.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <span>
#include <system_error>

#include "core/check.hpp"
#include "io/atomic_file.hpp"
#include "output_error.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// The same file or, where there is none yet, the same place.
bool is_same(const fs::path& a, const fs::path& b) {
  std::error_code error;
  if (fs::equivalent(a, b, error)) return true;
  return a.filename() == b.filename() && fs::equivalent(folder_of(a), folder_of(b), error);
}

}  // namespace

void check_destination(std::string_view option, const fs::path& path,
                       const std::vector<fs::path>& kept) {
  const fs::path target = AtomicFile::target_of(path);
  const fs::path folder = folder_of(target);
  std::error_code error;
  const fs::file_status status = fs::symlink_status(target, error);
  DISTMOE_CHECK(!fs::is_directory(status) && path.has_filename(), kInvalidArgument, option,
                " names ", path, ", which is a folder; legal: a file, such as ", path / "NAME");
  DISTMOE_CHECK(!fs::exists(status) || fs::is_regular_file(status), kInvalidArgument, option,
                " names ", path, ", which is not a regular file");
  DISTMOE_CHECK(fs::is_directory(folder, error), kInvalidArgument, option, " names ", path,
                ", but there is no folder ", folder);
  DISTMOE_CHECK(access(folder.c_str(), W_OK) == 0, kInvalidArgument, option, " names ", path,
                ", but the folder ", folder,
                " is not writable: ", std::generic_category().message(errno));
  for (const fs::path& file : kept) {
    DISTMOE_CHECK(!is_same(target, file), kInvalidArgument, option, " names ", path,
                  ", which would replace ", file, " of the checkpoint or the input of this run");
  }
}

void write_file(const fs::path& path, std::string_view text) {
  write_output([&] {
    AtomicFile file(path);
    file.write(std::as_bytes(std::span(text)));
    file.commit();
  });
}

}  // namespace distmoe::tools
