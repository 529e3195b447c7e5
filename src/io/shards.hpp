// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <vector>

#include "io/safetensors.hpp"

namespace distmoe {

/// The names in a checkpoint directory that weights are looked up under.
inline constexpr const char* kSingleShardFile = "model.safetensors";
inline constexpr const char* kShardIndexFile = "model.safetensors.index.json";

/// The weight files of a checkpoint directory: model.safetensors or, where there is none, every
/// shard that model.safetensors.index.json names. Throws io where a shard is missing or lies
/// outside the directory, where the index and the shards disagree, and where two shards hold one
/// tensor.
std::vector<SafetensorsFile> open_shards(const std::filesystem::path& directory);

}  // namespace distmoe
