// SPDX-License-Identifier: Apache-2.0
//
// Runs the built command as a user would, and makes the small files that it reads.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "distmoe/tensor.hpp"

namespace distmoe::tools {

using Words = std::vector<std::string>;

struct CommandResult {
  int exit_code = -1;  ///< 128 + signal where one ended the process
  std::string output;
  std::string error;
  std::chrono::duration<double> elapsed{};

  /// Parses `output`; a test failure and null where it is not one JSON value.
  nlohmann::json json() const;
};

/// A started process whose stdout and stderr go to files in `folder`.
class Process {
 public:
  Process(const Words& words, const std::filesystem::path& folder);
  ~Process();  ///< kills it where it still runs
  Process(const Process&) = delete;

  pid_t pid() const { return pid_; }
  /// Kills the process after `limit`, which fails the test.
  CommandResult wait(std::chrono::seconds limit = std::chrono::seconds(120));

 private:
  pid_t pid_ = -1;
  std::filesystem::path output_path_;
  std::filesystem::path error_path_;
  std::chrono::steady_clock::time_point begin_;
};

/// "distmoe" of this build.
std::string command_path();
/// `mpirun` of `num_ranks` ranks; the command's words follow.
Words mpirun(int num_ranks, const Words& more = {});
/// Why MPI cannot be tested here; empty where it can.
std::string mpi_problem();

/// The folder of a checkpoint: testdata/NAME or ../shared/data/NAME; empty where neither is there.
std::filesystem::path checkpoint_folder(const std::string& name);

/// A folder of its own for every test, removed afterwards.
class CommandTest : public testing::Test {
 public:
  ~CommandTest() override;

 protected:
  CommandTest();

  std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  /// Runs any program.
  CommandResult run_words(const Words& words);
  /// distmoe run --checkpoint `checkpoint` ...
  CommandResult run(const std::filesystem::path& checkpoint, const Words& more);
  /// The same with mpirun and --engine mpi.
  CommandResult run_mpi(int num_ranks, const std::filesystem::path& checkpoint, const Words& more);
  /// Fails the test if anything but the inputs lies in the folder.
  void expect_no_output(const std::string& name) const;

  std::filesystem::path folder_;

 private:
  int num_commands_ = 0;
};

/// A layer of one of the checkpoints with an input and a reference, by name and index. Skipped
/// where the checkpoint is not there.
class CheckpointLayerTest : public CommandTest,
                            public ::testing::WithParamInterface<std::tuple<const char*, int>> {
 protected:
  void SetUp() override;
  int layer() const { return std::get<1>(GetParam()); }

  std::filesystem::path checkpoint_;
};
/// All of them, for INSTANTIATE_TEST_SUITE_P, and their names: "qwen3moeLayer0".
inline auto checkpoint_layers() {
  return ::testing::Combine(::testing::Values("qwen3moe", "mixtral", "gptoss", "deepseekv3"),
                            ::testing::Values(0, 1));
}
std::string checkpoint_layer_name(
    const ::testing::TestParamInfo<CheckpointLayerTest::ParamType>& layer);

/// Whether `error` says that `rank` did not come. A rank that had all of its bytes is one call
/// further, where those that still wait for it did not arrive either: it names both.
bool names_absent_rank(const std::string& error, int rank);

std::string read_file(const std::filesystem::path& path);
/// The bytes of tensor `y` of an output file, which must be BF16 [T, D].
std::string read_y(const std::filesystem::path& path, std::int64_t num_tokens,
                   std::int64_t hidden_dim);

/// Input tensors of one layer, all tokens and scores distinct.
struct SampleInput {
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;
  std::int64_t hidden_dim = 0;
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> ids;
  std::vector<float> scores;

  SampleInput(std::int64_t num_tokens, std::int64_t top_k, std::int64_t hidden_dim,
              std::vector<std::int64_t> ids);
  /// Writes x, topk_ids (as `ids_dtype`) and topk_scores without a prefix.
  void write(const std::filesystem::path& path, DType ids_dtype = DType::kI32) const;
};

}  // namespace distmoe::tools
