// SPDX-License-Identifier: Apache-2.0
#include "output_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "core/check.hpp"
#include "core/checked_math.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBytesPerElement = 2;
constexpr std::int64_t kHeaderAlignment = 8;
constexpr int kMaxLinks = 40;

// The name that the rename replaces: a link's target, existing or not, rather than the link.
fs::path resolved(fs::path path) {
  std::error_code error;
  for (int link = 0; link < kMaxLinks && fs::is_symlink(path, error); ++link) {
    const fs::path target = fs::read_symlink(path, error);
    if (error) break;
    path = path.parent_path() / target;
  }
  return path;
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

std::string header_of_y(std::int64_t num_tokens, std::int64_t hidden_dim, std::int64_t num_bytes) {
  std::string header = concat(R"({"y":{"dtype":"BF16","shape":[)", num_tokens, ",", hidden_dim,
                              R"(],"data_offsets":[0,)", num_bytes, "]}}");
  const auto length = static_cast<std::int64_t>(header.size());
  header.resize(static_cast<std::size_t>(ceil_div(length, kHeaderAlignment) * kHeaderAlignment),
                ' ');
  return header;
}

}  // namespace

void OutputFile::check_destination(const fs::path& path, const std::vector<fs::path>& inputs) {
  const fs::path target = resolved(path);
  const fs::path folder = folder_of(target);
  std::error_code error;
  const fs::file_status status = fs::status(target, error);
  DISTMOE_CHECK(!fs::exists(status) || fs::is_regular_file(status), kInvalidArgument,
                "--output names ", path, ", which is not a regular file");
  DISTMOE_CHECK(target.has_filename() && fs::is_directory(folder, error), kInvalidArgument,
                "--output names ", path, ", but there is no folder ", folder);
  DISTMOE_CHECK(access(folder.c_str(), W_OK) == 0, kInvalidArgument, "--output names ", path,
                ", but the folder ", folder, " is not writable: ", std::strerror(errno));
  for (const fs::path& input : inputs) {
    DISTMOE_CHECK(!fs::equivalent(target, input, error), kInvalidArgument, "--output names ", path,
                  ", which is an input of this run");
  }
}

OutputFile::OutputFile(const fs::path& path, std::int64_t num_tokens, std::int64_t hidden_dim)
    : path_(resolved(path)),
      temporary_path_(path_.string() + concat(".", getpid(), ".partial")),
      missing_bytes_(checked_product(num_tokens, hidden_dim, kBytesPerElement)),
      descriptor_(::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  DISTMOE_CHECK(descriptor_ >= 0, kIo, "cannot create ", temporary_path_, ": ",
                std::strerror(errno));
  const std::string header = header_of_y(num_tokens, hidden_dim, missing_bytes_);
  const std::uint64_t header_bytes = header.size();
  try {
    write(&header_bytes, sizeof header_bytes);
    write(header.data(), header.size());
  } catch (...) {
    ::close(descriptor_);
    ::unlink(temporary_path_.c_str());
    throw;
  }
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_path_.c_str());
}

void OutputFile::append(std::span<const std::byte> bytes) {
  write(bytes.data(), bytes.size());
  missing_bytes_ -= static_cast<std::int64_t>(bytes.size());
}

void OutputFile::commit() {
  DISTMOE_CHECK(missing_bytes_ == 0, kInternal, "the output ", path_, " lacks ", missing_bytes_,
                " bytes");
  const int descriptor = descriptor_;
  descriptor_ = -1;
  const bool is_complete = ::close(descriptor) == 0;
  if (is_complete && ::rename(temporary_path_.c_str(), path_.c_str()) == 0) return;
  const int reason = errno;
  ::unlink(temporary_path_.c_str());
  throw_error(ErrorCode::kIo, concat("cannot complete ", path_, ": ", std::strerror(reason)));
}

void OutputFile::write(const void* data, std::size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, num_bytes);
    if (written < 0 && errno == EINTR) continue;
    DISTMOE_CHECK(written > 0, kIo, "cannot write ", temporary_path_, ": ", std::strerror(errno));
    next += written;
    num_bytes -= static_cast<std::size_t>(written);
  }
}

}  // namespace distmoe::tools
