// SPDX-License-Identifier: Apache-2.0
#include "command_testing.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <regex>
#include <thread>

#include "io/safetensors.hpp"
#include "io/write_safetensors.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::uint16_t kFirstBF16 = 0x3c00;  // 2^-7; the next ones are a little larger each

template <typename Value>
std::vector<Value> cast(const std::vector<std::int64_t>& values) {
  std::vector<Value> result;
  result.reserve(values.size());
  for (const std::int64_t value : values) result.push_back(static_cast<Value>(value));
  return result;
}

}  // namespace

nlohmann::json CommandResult::json() const {
  nlohmann::json value = nlohmann::json::parse(output, nullptr, false);
  if (!value.is_discarded()) return value;
  ADD_FAILURE() << "stdout is not JSON: " << output << "\nstderr: " << error;
  return nullptr;
}

Process::Process(const Words& words, const fs::path& folder)
    : output_path_(folder / "stdout"),
      error_path_(folder / "stderr"),
      begin_(std::chrono::steady_clock::now()) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output_path_.c_str(), kFlags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, error_path_.c_str(), kFlags, 0600);
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int problem =
      posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (problem != 0) {
    pid_ = -1;
    ADD_FAILURE() << "cannot start " << words[0] << ": " << std::strerror(problem);
  }
}

Process::~Process() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

CommandResult Process::wait(std::chrono::seconds limit) {
  int status = 0;
  bool was_killed = false;
  while (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == 0) {
    if (!was_killed && std::chrono::steady_clock::now() - begin_ > limit) {
      ADD_FAILURE() << "still running after " << limit.count() << " s";
      kill(pid_, SIGKILL);
      was_killed = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  pid_ = -1;
  CommandResult result;
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.output = read_file(output_path_);
  result.error = read_file(error_path_);
  result.elapsed = std::chrono::steady_clock::now() - begin_;
  return result;
}

std::string command_path() { return DISTMOE_COMMAND; }

Words mpirun(int num_ranks, const Words& more) {
  Words words{"mpirun", "--allow-run-as-root", "--oversubscribe"};
#if defined(DISTMOE_SANITIZED)
  // Open MPI keeps memory until the end of the process.
  words.insert(words.end(), {"-x", "ASAN_OPTIONS=detect_leaks=0"});
#endif
  words.insert(words.end(), more.begin(), more.end());
  words.insert(words.end(), {"-n", std::to_string(num_ranks)});
  return words;
}

std::string mpi_problem() {
  static const std::string problem = []() -> std::string {
    if (std::system("mpirun --version > /dev/null 2>&1") != 0) return "there is no mpirun";
    const std::string has_engine = "'" + command_path() + "' info | grep -q 'mpi: runs here'";
    return std::system(has_engine.c_str()) == 0 ? "" : "the MPI engine does not run here";
  }();
  return problem;
}

fs::path checkpoint_folder(const std::string& name) {
  for (const fs::path parent : {DISTMOE_TESTDATA, DISTMOE_SHARED_DATA}) {
    if (fs::exists(parent / name / "config.json")) return parent / name;
  }
  return {};
}

CommandTest::CommandTest()
    : folder_(fs::path(::testing::TempDir()) / ("distmoe-command-" + std::to_string(getpid()))) {
  fs::create_directories(folder_);
}

CommandTest::~CommandTest() { fs::remove_all(folder_); }

CommandResult CommandTest::run_words(const Words& words) {
  const fs::path logs = folder_ / ("command" + std::to_string(num_commands_++));
  fs::create_directory(logs);
  CommandResult result = Process(words, logs).wait();
  fs::remove_all(logs);
  return result;
}

CommandResult CommandTest::run(const fs::path& checkpoint, const Words& more) {
  Words words{command_path(), "run", "--checkpoint", checkpoint.string()};
  words.insert(words.end(), more.begin(), more.end());
  return run_words(words);
}

CommandResult CommandTest::run_mpi(int num_ranks, const fs::path& checkpoint, const Words& more) {
  Words words = mpirun(num_ranks);
  words.insert(words.end(),
               {command_path(), "run", "--engine", "mpi", "--checkpoint", checkpoint.string()});
  words.insert(words.end(), more.begin(), more.end());
  return run_words(words);
}

void CommandTest::expect_no_output(const std::string& name) const {
  for (const auto& entry : fs::directory_iterator(folder_)) {
    EXPECT_NE(entry.path().filename().string().rfind(name, 0), 0u)
        << entry.path() << " was left behind";
  }
}

void CheckpointLayerTest::SetUp() {
  const std::string name = std::get<0>(GetParam());
  checkpoint_ = checkpoint_folder(name);
  if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint " << name;
}

std::string checkpoint_layer_name(
    const ::testing::TestParamInfo<CheckpointLayerTest::ParamType>& layer) {
  return std::string(std::get<0>(layer.param)) + "Layer" + std::to_string(std::get<1>(layer.param));
}

bool names_absent_rank(const std::string& error, int rank) {
  const std::string number = std::to_string(rank) + "\\b";
  return std::regex_search(error,
                           std::regex("\\brank " + number + "|\\branks [0-9, and]*\\b" + number));
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string read_y(const fs::path& path, std::int64_t num_tokens, std::int64_t hidden_dim) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const StoredTensor* y = file.find("y");
  if (y == nullptr || y->dtype != DType::kBF16 ||
      y->shape != std::vector<std::int64_t>{num_tokens, hidden_dim}) {
    ADD_FAILURE() << path << " has y " << (y == nullptr ? "nowhere" : y->describe());
    return {};
  }
  return {reinterpret_cast<const char*>(y->data.data()), y->data.size()};
}

SampleInput::SampleInput(std::int64_t num_tokens_in, std::int64_t top_k_in,
                         std::int64_t hidden_dim_in, std::vector<std::int64_t> ids_in)
    : num_tokens(num_tokens_in),
      top_k(top_k_in),
      hidden_dim(hidden_dim_in),
      ids(std::move(ids_in)) {
  for (std::int64_t i = 0; i < num_tokens * hidden_dim; ++i) {
    const auto sign = static_cast<std::uint16_t>(i % 3 == 1 ? 0x8000 : 0);
    x.push_back(static_cast<std::uint16_t>((kFirstBF16 + i * 7 % 509) | sign));
  }
  for (std::int64_t i = 0; i < num_tokens * top_k; ++i) {
    scores.push_back(1.0f / static_cast<float>(i + 2));
  }
}

void SampleInput::write(const fs::path& path, DType ids_dtype) const {
  const std::vector<std::int32_t> ids32 = cast<std::int32_t>(ids);
  const std::vector<std::int16_t> ids16 = cast<std::int16_t>(ids);
  const std::vector<float> real_ids = cast<float>(ids);
  const void* ids_data = ids.data();
  if (ids_dtype == DType::kI32 || ids_dtype == DType::kU32) ids_data = ids32.data();
  if (ids_dtype == DType::kI16) ids_data = ids16.data();
  if (ids_dtype == DType::kF32) ids_data = real_ids.data();
  distmoe::testing::write_safetensors(
      path, {{"x", TensorView(x.data(), DType::kBF16, {num_tokens, hidden_dim})},
             {"topk_ids", TensorView(ids_data, ids_dtype, {num_tokens, top_k})},
             {"topk_scores", TensorView(scores.data(), DType::kF32, {num_tokens, top_k})}});
}

}  // namespace distmoe::tools
