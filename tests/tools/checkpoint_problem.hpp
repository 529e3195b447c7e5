// SPDX-License-Identifier: Apache-2.0
//
// A layer of a checkpoint as the conformance suite's oracles take it, and what `distmoe run` wrote
// about it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "conformance/moe_problem.hpp"
#include "io/safetensors.hpp"

namespace distmoe::tools {

/// All tensors of an output file by name, as FP32, and its bytes.
class TensorFile {
 public:
  explicit TensorFile(const std::filesystem::path& path);

  const StoredTensor& tensor(const std::string& name) const;
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  /// Of BF16 or FP32.
  std::vector<float> values(const std::string& name) const;
  std::vector<BF16> rows(const std::string& name) const;
  std::vector<std::uint8_t> bytes_of(const std::string& name) const;
  /// The bytes of every tensor, by name.
  std::map<std::string, std::string> bytes() const;

 private:
  SafetensorsFile file_;
};

/// Rows [0, half) of every expert's 2 * half rows to `first`, the others to `second`.
template <typename Value>
void split_halves(const Value* rows, std::int64_t experts, std::int64_t half_size,
                  std::vector<Value>& first, std::vector<Value>& second) {
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const Value* begin = rows + 2 * expert * half_size;
    first.insert(first.end(), begin, begin + half_size);
    second.insert(second.end(), begin + half_size, begin + 2 * half_size);
  }
}

/// All tokens and experts of a layer, with the input that lies beside the checkpoint.
conformance::MoeProblem problem_of(const std::filesystem::path& folder, std::int64_t layer);

}  // namespace distmoe::tools
