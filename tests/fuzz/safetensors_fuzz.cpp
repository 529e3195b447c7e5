// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a safetensors file: either an io error, or tensors that lie within the bytes, do not
// overlap and have the size that their type and shape need.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "distmoe/error.hpp"
#include "io/safetensors.hpp"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const distmoe::SafetensorsContents& contents, std::span<const std::byte> file) {
  std::size_t total = 0;
  for (const distmoe::StoredTensor& tensor : contents.tensors) {
    total += tensor.data.size();
    if (tensor.data.empty()) continue;
    require(tensor.data.data() >= file.data());
    require(tensor.data.data() + tensor.data.size() <= file.data() + file.size());
    if (!tensor.dtype) continue;
    std::size_t num_bytes = distmoe::size_of(*tensor.dtype);
    for (const std::int64_t extent : tensor.shape) num_bytes *= static_cast<std::size_t>(extent);
    require(num_bytes == tensor.data.size());
  }
  require(total <= file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  try {
    check(distmoe::parse_safetensors(file, "fuzz"), file);
  } catch (const distmoe::Error& error) {
    require(error.code() == distmoe::ErrorCode::kIo);
  }
  return 0;
}
