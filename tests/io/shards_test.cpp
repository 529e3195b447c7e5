// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the shards of an index hold what the index says, once, beside the index; a matrix and
// its scales may lie in different shards.
#include "io/shards.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/expect_error.hpp"
#include "io/temporary_directory.hpp"
#include "io/tiny_model.hpp"

namespace distmoe {
namespace {

using testing::expect_error;
using testing::OwnedTensor;
using testing::TemporaryDirectory;
using testing::TinyModel;

constexpr TinyModel kModel{.num_experts = 3, .d = 130, .f = 20};

using Shards = std::map<std::string, std::vector<OwnedTensor>>;

std::string index_of(const Shards& shards) {
  std::string entries;
  for (const auto& [file, tensors] : shards) {
    for (const OwnedTensor& tensor : tensors) {
      entries += (entries.empty() ? "\"" : ",\"") + tensor.name + "\":\"" + file + "\"";
    }
  }
  return R"({"metadata":{"total_size":[1,{"a":2}],"b":null},"weight_map":{)" + entries + "}}";
}

void write(const TemporaryDirectory& directory, const Shards& shards, const std::string& index) {
  testing::write_file(directory / "config.json", kModel.config("DeepseekV3ForCausalLM", 1));
  for (const auto& [file, tensors] : shards) {
    testing::write_tensors(directory / file, tensors);
  }
  testing::write_file(directory / "model.safetensors.index.json", index);
}

/// Deals the tensors out in turn: each scale lies in another shard than its matrix.
Shards deal(const std::vector<OwnedTensor>& tensors) {
  Shards shards;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    shards["part-" + std::to_string(i % 3) + ".safetensors"].push_back(tensors[i]);
  }
  return shards;
}

void expect_refused(const TemporaryDirectory& directory,
                    std::initializer_list<std::string_view> fragments) {
  expect_error(ErrorCode::kIo, fragments, [&] { Checkpoint::open(directory.path()); });
}

// reports: A126
TEST(Shards, LoadsAMatrixWhoseScalesLieInAnotherShard) {
  const Shards shards = deal(kModel.fp8(0));
  ASSERT_EQ(shards.size(), 3u);
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  const LoadedExperts experts = Checkpoint::open(directory.path()).load_experts(0, 1, 2);
  const std::vector<BF16> w13 = kModel.w13(0, 1, 2);
  ASSERT_EQ(experts.w13.num_bytes(), w13.size() * sizeof(BF16));
  EXPECT_EQ(std::memcmp(experts.w13.data(), w13.data(), experts.w13.num_bytes()), 0);
}

TEST(Shards, AreFilesOfTheCheckpointBesideTheNamesThatAreLookedUp) {
  const Shards shards = deal(kModel.fp8(0));
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  std::vector<std::filesystem::path> files = Checkpoint::open(directory.path()).files();
  std::ranges::sort(files);
  EXPECT_EQ(files, (std::vector<std::filesystem::path>{
                       directory / "config.json", directory / "model.safetensors",
                       directory / "model.safetensors.index.json", directory / "part-0.safetensors",
                       directory / "part-1.safetensors", directory / "part-2.safetensors"}));
}

TEST(Shards, FollowsLinksAsDownloadCachesMakeThem) {
  const Shards shards = deal(kModel.fp8(0));
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  const TemporaryDirectory blobs;
  std::filesystem::rename(directory / "part-1.safetensors", blobs / "0123");
  std::filesystem::create_symlink(blobs / "0123", directory / "part-1.safetensors");
  EXPECT_EQ(open_shards(directory.path()).size(), 3u);
}

TEST(Shards, PrefersTheSingleFileAsTransformersDoes) {
  const Shards shards = deal(kModel.fp8(0));
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  testing::write_tensors(directory / "model.safetensors", kModel.fp8(0));
  EXPECT_EQ(open_shards(directory.path()).size(), 1u);
}

TEST(Shards, RefusesADirectoryWithoutWeights) {
  const TemporaryDirectory directory;
  testing::write_file(directory / "config.json", kModel.config("DeepseekV3ForCausalLM", 1));
  expect_refused(directory, {"neither model.safetensors nor model.safetensors.index.json"});
  expect_error(ErrorCode::kIo, {"/absent/config.json", "No such file"},
               [&] { Checkpoint::open(directory / "absent"); });
}

TEST(Shards, RefusesAMissingShardByItsName) {
  const Shards shards = deal(kModel.fp8(0));
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  std::filesystem::remove(directory / "part-1.safetensors");
  expect_refused(directory, {"/part-1.safetensors", "No such file"});
}

TEST(Shards, RefusesATruncatedShardByItsName) {
  const Shards shards = deal(kModel.fp8(0));
  const TemporaryDirectory directory;
  write(directory, shards, index_of(shards));
  const auto size = std::filesystem::file_size(directory / "part-2.safetensors");
  std::filesystem::resize_file(directory / "part-2.safetensors", size - 1);
  expect_refused(directory, {"/part-2.safetensors", "truncated"});
}

TEST(Shards, RefusesShardNamesThatLeaveTheDirectory) {
  const TemporaryDirectory directory;
  for (const char* name : {"../part.safetensors", "/etc/passwd", "sub/part.safetensors", "..", ".",
                           "", "a\\\\b", "a\\u0000b"}) {
    write(directory, {}, std::string(R"({"weight_map":{"t":")") + name + "\"}}");
    expect_refused(directory, {"no plain file name", "model.safetensors.index.json"});
  }
}

TEST(Shards, RefusesATensorInTwoShards) {
  Shards shards = deal(kModel.fp8(0));
  const std::string index = index_of(shards);
  const OwnedTensor twin = shards["part-0.safetensors"].front();
  shards["part-2.safetensors"].push_back(twin);
  const TemporaryDirectory directory;
  write(directory, shards, index);
  expect_refused(directory, {twin.name, "two shards", "part-0.safetensors", "part-2.safetensors"});
}

TEST(Shards, RefusesAnIndexThatDisagreesWithItsShards) {
  const Shards shards = deal(kModel.fp8(0));
  const std::string tensor = shards.at("part-0.safetensors").front().name;
  {
    Shards moved = shards;
    moved["part-1.safetensors"].push_back(moved["part-0.safetensors"].front());
    moved["part-0.safetensors"].erase(moved["part-0.safetensors"].begin());
    const TemporaryDirectory directory;
    write(directory, shards, index_of(moved));
    expect_refused(directory, {tensor, "'part-1.safetensors', which does not hold it"});
  }
  {
    Shards incomplete = shards;
    incomplete["part-0.safetensors"].erase(incomplete["part-0.safetensors"].begin());
    const TemporaryDirectory directory;
    write(directory, shards, index_of(incomplete));
    expect_refused(directory, {tensor, "/part-0.safetensors is not in", "index.json"});
    write(directory, incomplete, index_of(shards));
    expect_refused(directory, {tensor, "which does not hold it"});
  }
}

TEST(Shards, RefusesAnIndexThatNamesATensorTwice) {
  const Shards shards = deal(kModel.fp8(0));
  const std::string tensor = shards.at("part-0.safetensors").front().name;
  const std::string entry = "\"" + tensor + "\":\"part-0.safetensors\"";
  std::string index = index_of(shards);
  index.insert(index.find(entry), entry + ",");
  const TemporaryDirectory directory;
  write(directory, shards, index);
  expect_refused(directory, {tensor, "twice", "model.safetensors.index.json"});
}

TEST(Shards, RefusesTextThatIsNoIndex) {
  const TemporaryDirectory directory;
  for (const char* index :
       {"", "{", "[]", "{}", "3", R"({"weight_map":3})", R"({"weight_map":{"t":3}})",
        R"({"weight_map":{"t":{}}})", R"({"weight_map":{"t":["f"]}})",
        R"({"weight_map":{"t":null}})", R"({"weight_map":{},"weight_map":{}})",
        R"({"metadata":{"weight_map":{}}})", "{\"weight_map\":{\"\xFF\":\"f\"}}"}) {
    write(directory, {}, index);
    expect_refused(directory, {"model.safetensors.index.json"});
  }
  write(directory, {}, R"({"weight_map":{},"a":)" + std::string(1'000'000, '['));
  expect_refused(directory, {"nests too deeply"});
}

}  // namespace
}  // namespace distmoe
