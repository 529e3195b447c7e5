// SPDX-License-Identifier: Apache-2.0
//
// Files for tests, by the writer that the command uses.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "distmoe/tensor.hpp"
#include "io/safetensors_writer.hpp"

namespace distmoe::testing {

/// A contiguous tensor on the CPU.
struct NamedTensor {
  std::string name;
  TensorView tensor;
};

inline void write_safetensors(const std::filesystem::path& path,
                              const std::vector<NamedTensor>& tensors) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    entries.push_back(
        {name, tensor.dtype, {tensor.shape.begin(), tensor.shape.begin() + tensor.rank}});
  }
  SafetensorsWriter writer(path, entries);
  for (const auto& [name, tensor] : tensors) {
    writer.append({static_cast<const std::byte*>(tensor.data), tensor.num_bytes()});
  }
  writer.commit();
}

}  // namespace distmoe::testing
