// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "core/check.hpp"
#include "io/quote.hpp"
#include "io/safetensors.hpp"
#include "io/stored_dtype.hpp"

namespace distmoe {
namespace {

/// A process number would not do: in containers they repeat, and what a killed process left behind
/// would be in the way.
std::filesystem::path partial_path(std::filesystem::path target) {
  std::random_device random;
  return target += concat(".partial-", std::hex, random(), random());
}

/// A file beside the target that disappears unless it is renamed to it.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::filesystem::path target)
      : target_(std::move(target)),
        path_(partial_path(target_)),
        descriptor_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) refuse("create");
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!is_committed_) ::unlink(path_.c_str());
  }

  void write(const void* data, std::size_t num_bytes) {
    const char* next = static_cast<const char*>(data);
    while (num_bytes > 0) {
      const ::ssize_t written = ::write(descriptor_, next, num_bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse("write");
      next += written;
      num_bytes -= static_cast<std::size_t>(written);
    }
  }

  void commit() {
    // Without it a crash may leave the new name with old or no bytes.
    if (::fsync(descriptor_) != 0) refuse("write");
    if (::close(std::exchange(descriptor_, -1)) != 0) refuse("write");
    if (std::rename(path_.c_str(), target_.c_str()) != 0) refuse("rename");
    is_committed_ = true;
  }

 private:
  [[noreturn]] void refuse(const char* action) const {
    const std::string reason = std::generic_category().message(errno);
    throw_error(ErrorCode::kIo, concat("cannot ", action, " ", path_.string(), " for ",
                                       target_.string(), ": ", reason));
  }

  std::filesystem::path target_;
  std::filesystem::path path_;
  int descriptor_;
  bool is_committed_ = false;
};

void check_writable(std::span<const NamedTensor> tensors) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    DISTMOE_CHECK(name != "__metadata__", kInvalidArgument,
                  "a tensor cannot be named __metadata__ in a safetensors file");
    DISTMOE_CHECK(names.insert(name).second, kInvalidArgument, "two tensors are named ",
                  quote(name));
    DISTMOE_CHECK(tensor.device.type == DeviceType::kCpu && tensor.is_contiguous(),
                  kInvalidArgument, "tensor ", quote(name), " is ", tensor.describe(),
                  "; only contiguous tensors on the CPU can be written");
    DISTMOE_CHECK(tensor.is_given(), kInvalidArgument, "tensor ", quote(name), " is not given");
    DISTMOE_CHECK(tensor.data != nullptr || tensor.num_bytes() == 0, kInvalidArgument, "tensor ",
                  quote(name), " is ", tensor.describe(), " without data");
  }
}

/// Wide types first, so that every tensor is aligned to its elements.
std::vector<const NamedTensor*> in_file_order(std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const std::size_t width_a = size_of(a->tensor.dtype);
    const std::size_t width_b = size_of(b->tensor.dtype);
    return width_a != width_b ? width_a > width_b : a->name < b->name;
  });
  return order;
}

std::string make_header(const std::vector<const NamedTensor*>& order, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const NamedTensor* named : order) {
    const TensorView& tensor = named->tensor;
    const std::size_t end = offset + tensor.num_bytes();
    header[named->name] = {{"dtype", stored_name_of(tensor.dtype)},
                           {"shape", std::vector<std::int64_t>(tensor.shape.begin(),
                                                               tensor.shape.begin() + tensor.rank)},
                           {"data_offsets", {offset, end}}};
    offset = end;
  }
  try {
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    return text;
  } catch (const nlohmann::json::exception&) {
    throw_error(ErrorCode::kInvalidArgument, "the name of a tensor or its metadata is not UTF-8");
  }
}

/// A link is followed, so that the file it points to is replaced; what is no file is left alone.
std::filesystem::path resolve_target(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) return path;
  DISTMOE_CHECK(std::filesystem::is_regular_file(status), kIo, "cannot write ", path.string(),
                ": it exists and is not a regular file");
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const Metadata& metadata) {
  check_writable(tensors);
  const std::vector<const NamedTensor*> order = in_file_order(tensors);
  const std::string header = make_header(order, metadata);
  const std::uint64_t header_bytes = header.size();

  TemporaryFile file(resolve_target(path));
  file.write(&header_bytes, sizeof(header_bytes));
  file.write(header.data(), header.size());
  for (const NamedTensor* named : order) {
    file.write(named->tensor.data, named->tensor.num_bytes());
  }
  file.commit();
}

}  // namespace distmoe
