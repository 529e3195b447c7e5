// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/check.hpp"
#include "core/current_error.hpp"
#include "io/quote.hpp"
#include "io/safetensors_header.hpp"
#include "io/stored_dtype.hpp"

namespace distmoe {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);

/// The header of the file, of `label`, as text; the data follow it.
std::string_view header_text(std::span<const std::byte> file_bytes, const std::string& label) {
  DISTMOE_CHECK(file_bytes.size() >= kLengthBytes, kIo, label, " has ", file_bytes.size(),
                " bytes; a safetensors file begins with the 8 bytes of its header's length");
  std::uint64_t length = 0;
  std::memcpy(&length, file_bytes.data(), kLengthBytes);
  const std::uint64_t available = file_bytes.size() - kLengthBytes;
  DISTMOE_CHECK(length <= kMaxHeaderBytes, kIo, label, " announces a safetensors header of ",
                length, " bytes; at most ", kMaxHeaderBytes, " are legal");
  DISTMOE_CHECK(length <= available, kIo, label, " announces a safetensors header of ", length,
                " bytes, but only ", available, " follow: it is truncated or no safetensors file");
  return {reinterpret_cast<const char*>(file_bytes.data()) + kLengthBytes, length};
}

/// Bytes that the shape and type of an entry need; empty for a type that we do not know.
std::optional<std::uint64_t> bytes_of(const HeaderEntry& entry, const std::string& label) {
  const std::optional<std::int64_t> bits = bits_of_stored_name(entry.dtype_name);
  if (!bits) return std::nullopt;
  const bool is_empty = std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end();
  std::int64_t total = is_empty ? 0 : *bits;
  for (const std::int64_t extent : entry.shape) {
    DISTMOE_CHECK(!__builtin_mul_overflow(total, extent, &total), kIo, "the shape of tensor ",
                  quote(entry.name), " in ", label, " does not fit in 64 bits");
  }
  DISTMOE_CHECK(total % 8 == 0, kIo, "tensor ", quote(entry.name), " in ", label,
                " does not end at a byte");
  return static_cast<std::uint64_t>(total / 8);
}

void check_extent(const HeaderEntry& entry, std::uint64_t data_bytes, const std::string& label) {
  DISTMOE_CHECK(entry.begin <= entry.end && entry.end <= data_bytes, kIo, "tensor ",
                quote(entry.name), " in ", label, " lies at bytes ", entry.begin, " to ", entry.end,
                " of data that have ", data_bytes, " bytes: the file is truncated or damaged");
  const std::optional<std::uint64_t> needed = bytes_of(entry, label);
  DISTMOE_CHECK(!needed || *needed == entry.end - entry.begin, kIo, "tensor ", quote(entry.name),
                " in ", label, " has ", entry.end - entry.begin, " bytes, but its type ",
                entry.dtype_name, " and shape need ", needed.value_or(0));
}

/// Entries sorted by position must lie end to end and cover the data.
void check_coverage(const std::vector<HeaderEntry>& entries, std::uint64_t data_bytes,
                    const std::string& label) {
  std::uint64_t covered = 0;
  for (const HeaderEntry& entry : entries) {
    DISTMOE_CHECK(entry.begin >= covered, kIo, "tensor ", quote(entry.name), " in ", label,
                  " begins at byte ", entry.begin, ", inside the tensor before it, which ends at ",
                  covered);
    DISTMOE_CHECK(entry.begin == covered, kIo, "bytes ", covered, " to ", entry.begin, " of ",
                  label, ", before tensor ", quote(entry.name), ", belong to no tensor");
    covered = entry.end;
  }
  DISTMOE_CHECK(covered == data_bytes, kIo, "the last ", data_bytes - covered, " bytes of ", label,
                " belong to no tensor");
}

}  // namespace

DType StoredTensor::known_dtype() const {
  if (!dtype) throw_error(ErrorCode::kInternal, "no type of ours is " + dtype_name);
  return *dtype;
}

std::string StoredTensor::describe() const {
  std::ostringstream text;
  text << dtype_name << " [";
  for (std::size_t dim = 0; dim < shape.size(); ++dim) text << (dim ? ", " : "") << shape[dim];
  text << ']';
  return text.str();
}

SafetensorsContents parse_safetensors(std::span<const std::byte> file_bytes,
                                      const std::string& label) {
  const std::string_view json = header_text(file_bytes, label);
  const std::span<const std::byte> data = file_bytes.subspan(kLengthBytes + json.size());
  SafetensorsHeader header = read_safetensors_header(json, label);

  for (const HeaderEntry& entry : header.entries) check_extent(entry, data.size(), label);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const HeaderEntry& a, const HeaderEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  check_coverage(header.entries, data.size(), label);

  SafetensorsContents contents;
  contents.metadata = std::move(header.metadata);
  contents.tensors.reserve(header.entries.size());
  for (HeaderEntry& entry : header.entries) {
    StoredTensor& tensor = contents.tensors.emplace_back();
    tensor.name = std::move(entry.name);
    tensor.dtype = dtype_of_stored_name(entry.dtype_name);
    tensor.dtype_name = std::move(entry.dtype_name);
    tensor.shape = std::move(entry.shape);
    tensor.data = data.subspan(entry.begin, entry.end - entry.begin);
  }
  std::ranges::sort(contents.tensors, {}, &StoredTensor::name);
  const auto twin = std::ranges::adjacent_find(contents.tensors, {}, &StoredTensor::name);
  if (twin != contents.tensors.end()) {
    throw_error(ErrorCode::kIo, concat(label, " has two tensors named ", quote(twin->name)));
  }
  return contents;
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  return only_errors("opening a safetensors file",
                     [&] { return SafetensorsFile(path, MappedFile::open(path)); });
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path, MappedFile mapping)
    : path_(std::move(path)),
      mapping_(std::move(mapping)),
      contents_(parse_safetensors(mapping_.bytes(), path_.string())) {}

const StoredTensor* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto place = std::ranges::lower_bound(contents_.tensors, name, {}, &StoredTensor::name);
  return place != contents_.tensors.end() && place->name == name ? &*place : nullptr;
}

}  // namespace distmoe
