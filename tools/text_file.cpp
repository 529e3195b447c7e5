// SPDX-License-Identifier: Apache-2.0
#include "text_file.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "core/check.hpp"

namespace distmoe::tools {

void write_text_file(const std::filesystem::path& path, std::string_view text) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  DISTMOE_CHECK(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status), kIo,
                path, " is not a regular file");
  const std::filesystem::path temporary = path.string() + concat(".", getpid(), ".partial");
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  DISTMOE_CHECK(file, kIo, "cannot create ", temporary, ": ", std::strerror(errno));
  file.write(text.data(), std::ssize(text));
  file.close();
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw_error(ErrorCode::kIo, concat("cannot write ", path, ": ",
                                       error ? error.message() : std::strerror(errno)));
  }
}

}  // namespace distmoe::tools
