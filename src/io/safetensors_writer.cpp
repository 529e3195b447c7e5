// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_writer.hpp"

#include <nlohmann/json.hpp>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "io/stored_dtype.hpp"

namespace distmoe {
namespace {

constexpr std::size_t kHeaderAlignment = 8;

std::int64_t bytes_of(const TensorEntry& tensor) {
  auto bytes = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (const std::int64_t extent : tensor.shape) bytes = checked_mul(bytes, extent);
  return bytes;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const TensorEntry> tensors, const Metadata& metadata)
    : file_(path), path_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const TensorEntry& tensor : tensors) {
    const std::int64_t begin = missing_bytes_;
    missing_bytes_ = checked_add(begin, bytes_of(tensor));
    header[tensor.name] = {{"dtype", stored_name_of(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {begin, missing_bytes_}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const std::uint64_t header_bytes = text.size();
  file_.write(std::as_bytes(std::span(&header_bytes, 1)));
  file_.write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  file_.write(bytes);
  missing_bytes_ -= static_cast<std::int64_t>(bytes.size());
}

void SafetensorsWriter::commit() {
  DISTMOE_CHECK(missing_bytes_ == 0, kInternal, path_, " lacks ", missing_bytes_, " bytes");
  file_.commit();
}

}  // namespace distmoe
