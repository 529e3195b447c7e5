// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as the files of a checkpoint directory: either an io or an unsupported error, or a
// checkpoint whose experts all load. The input is split at "\n--\n" into config.json,
// model.safetensors.index.json and shards a, b, ...; where the index is empty the first shard is
// model.safetensors. Of a shard only header and data are given; its length field is written here,
// so that mutations reach beyond it.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "distmoe/error.hpp"
#include "io/checkpoint.hpp"
#include "io/raw_safetensors.hpp"

namespace {

constexpr std::string_view kSeparator = "\n--\n";
constexpr std::size_t kMaxShards = 3;

void require(bool condition) {
  if (!condition) std::abort();
}

/// In memory where the system has such a place: the fuzzer writes files all the time.
std::filesystem::path make_directory() {
  const std::filesystem::path base =
      std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path();
  const std::filesystem::path directory =
      base / ("distmoe-checkpoint-fuzz-" + std::to_string(::getpid()));
  std::filesystem::create_directories(directory);
  return directory;
}

struct Directory {
  std::filesystem::path path = make_directory();
  ~Directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

void write(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (parts.size() < kMaxShards + 1) {
    const std::size_t end = text.find(kSeparator);
    if (end == std::string_view::npos) break;
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + kSeparator.size());
  }
  parts.push_back(text);
  return parts;
}

/// The header ends at the first "}}" or "}", in this order; what follows is data.
std::string shard_of(std::string_view text) {
  std::size_t length = text.size();
  if (const std::size_t end = text.find("}}"); end != std::string_view::npos) {
    length = end + 2;
  } else if (const std::size_t brace = text.find('}'); brace != std::string_view::npos) {
    length = brace + 1;
  }
  return distmoe::testing::raw_safetensors(text.substr(0, length), text.substr(length));
}

/// Codes that load are prepared weights that a call takes.
void load_codes(const distmoe::Checkpoint& checkpoint, std::int64_t layer,
                distmoe::BlockShape blocks) {
  try {
    const distmoe::CodedExperts experts =
        checkpoint.load_coded_experts(layer, 0, checkpoint.shape().num_experts, blocks);
    require(experts.w13.codes.num_bytes() == 2 * experts.w2.codes.num_bytes());
    const distmoe::ExpertWeights view = experts.view();
    distmoe::check_scales(view.prepared_w13);
    distmoe::check_scales(view.prepared_w2);
  } catch (const distmoe::Error& error) {
    // Of BF16, or of other blocks.
    require(error.code() == distmoe::ErrorCode::kUnsupported);
  }
}

void load_everything(const std::filesystem::path& directory) {
  const distmoe::Checkpoint checkpoint = distmoe::Checkpoint::open(directory);
  const std::int64_t num_experts = checkpoint.shape().num_experts;
  for (const std::int64_t layer : checkpoint.moe_layers()) {
    const distmoe::LoadedExperts experts = checkpoint.load_experts(layer, 0, num_experts);
    require(experts.view().w13_L2FD.num_bytes() == experts.w13.num_bytes());
    require(experts.view().w2_LDF.num_bytes() == experts.w2.num_bytes());
  }
  for (const std::int64_t layer : checkpoint.moe_layers()) {
    load_codes(checkpoint, layer, distmoe::BlockShape::kRows);
    load_codes(checkpoint, layer, distmoe::BlockShape::kTiles);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directory directory;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string_view> parts = split(input);
  for (const auto& entry : std::filesystem::directory_iterator(directory.path)) {
    std::filesystem::remove(entry.path());
  }
  write(directory.path / "config.json", parts[0]);
  const bool is_sharded = parts.size() > 1 && !parts[1].empty();
  if (is_sharded) write(directory.path / "model.safetensors.index.json", parts[1]);
  for (std::size_t i = 2; i < parts.size(); ++i) {
    const std::string name = is_sharded ? std::string(1, static_cast<char>('a' + i - 2))
                                        : std::string("model.safetensors");
    write(directory.path / name, shard_of(parts[i]));
  }
  try {
    load_everything(directory.path);
  } catch (const distmoe::Error& error) {
    require(error.code() == distmoe::ErrorCode::kIo ||
            error.code() == distmoe::ErrorCode::kUnsupported);
  }
  return 0;
}
