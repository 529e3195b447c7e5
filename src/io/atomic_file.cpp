// SPDX-License-Identifier: Apache-2.0
#include "io/atomic_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <string>
#include <system_error>
#include <utility>

#include "core/check.hpp"

namespace distmoe {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLinks = 40;
/// Of the target's name in the temporary one, which must not exceed the 255 bytes of a name.
constexpr std::size_t kMaxStemBytes = 200;

constexpr const char* kTemporaryMark = ".partial-";

std::string temporary_stem(const fs::path& target) {
  return target.filename().string().substr(0, kMaxStemBytes) + kTemporaryMark;
}

/// NOTE: the process number would not do: in containers it repeats, so that what a killed process
/// left behind would be in the way of every later one.
fs::path temporary_beside(const fs::path& target) {
  std::random_device random;
  return target.parent_path() / concat(temporary_stem(target), std::hex, random(), random());
}

/// Below zero, with errno, where it cannot be created.
int create(const fs::path& temporary, const fs::path& target) {
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(target, ignored);
  DISTMOE_CHECK(!fs::exists(status) || fs::is_regular_file(status), kIo, "cannot write ", target,
                ": it exists and is not a regular file");
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  // The lock ends with the process: without it the file is abandoned. Not every file system has
  // locks; there nobody can take it either, and the file stays.
  if (descriptor >= 0) ::flock(descriptor, LOCK_EX | LOCK_NB);
  return descriptor;
}

}  // namespace

fs::path AtomicFile::target_of(const fs::path& path) {
  fs::path target = path;
  std::error_code error;
  for (int link = 0; link < kMaxLinks && fs::is_symlink(target, error); ++link) {
    const fs::path next = fs::read_symlink(target, error);
    if (error) break;
    target = target.parent_path() / next;
  }
  return target;
}

bool AtomicFile::is_temporary_of(const fs::path& path, const fs::path& file) {
  return file.filename().string().starts_with(temporary_stem(path));
}

bool AtomicFile::remove_abandoned(const fs::path& temporary) {
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) return false;
  const bool is_abandoned = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  const bool is_removed = is_abandoned && ::unlink(temporary.c_str()) == 0;
  ::close(descriptor);
  return is_removed;
}

AtomicFile::AtomicFile(const fs::path& path)
    : target_(target_of(path)),
      temporary_(temporary_beside(target_)),
      descriptor_(create(temporary_, target_)) {
  if (descriptor_ < 0) refuse("create");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!is_committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ::ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse("write");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  // Without it a crash may leave the new name with old or no bytes.
  if (::fsync(descriptor_) != 0) refuse("write");
  if (::close(std::exchange(descriptor_, -1)) != 0) refuse("write");
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) refuse("rename");
  is_committed_ = true;
}

void AtomicFile::refuse(const char* action) const {
  const std::string reason = std::generic_category().message(errno);
  throw_error(ErrorCode::kIo, concat("cannot ", action, " ", temporary_.string(), " for ",
                                     target_.string(), ": ", reason));
}

}  // namespace distmoe
