// SPDX-License-Identifier: Apache-2.0
#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/check.hpp"

namespace distmoe {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

std::string last_system_error() { return std::generic_category().message(errno); }

}  // namespace

MappedFile MappedFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  DISTMOE_CHECK(file.get() >= 0, kIo, "cannot open ", path.string(), ": ", last_system_error());
  struct stat status {};
  DISTMOE_CHECK(::fstat(file.get(), &status) == 0, kIo, "cannot examine ", path.string(), ": ",
                last_system_error());
  DISTMOE_CHECK(S_ISREG(status.st_mode), kIo, path.string(), " is not a regular file");
  const auto num_bytes = static_cast<std::size_t>(status.st_size);
  MappedFile mapping;
  if (num_bytes == 0) return mapping;
  void* address = ::mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  DISTMOE_CHECK(address != MAP_FAILED, kIo, "cannot map ", path.string(), " (", num_bytes,
                " bytes): ", last_system_error());
  mapping.bytes_ = {static_cast<const std::byte*>(address), num_bytes};
  return mapping;
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.data() == nullptr) return;
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace distmoe
