// SPDX-License-Identifier: Apache-2.0
// Invariant: under mpirun one rank speaks and writes, all ranks exit alike, and a rank that stops
// or dies ends the others with peer_lost, naming it, within the timeout.
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <thread>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

class RunMpi : public CommandTest {
 protected:
  void SetUp() override {
    if (!mpi_problem().empty()) GTEST_SKIP() << mpi_problem();
    checkpoint_ = checkpoint_folder("qwen3moe");
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint qwen3moe";
  }

  /// What mpirun starts: one application context of `num_ranks` ranks.
  Words context(int num_ranks, const Words& more) const {
    Words words{
        "-n",           std::to_string(num_ranks), command_path(), "run", "--engine",  "mpi",
        "--checkpoint", checkpoint_.string(),      "--layer",      "0",   "--timeout", "20"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  /// Two ranks that are started with different words.
  CommandResult run_different(const Words& first, const Words& second) {
    Words words = mpirun(1);
    words.resize(words.size() - 2);
    for (const Words& part : {context(1, first), Words{":"}, context(1, second)}) {
      words.insert(words.end(), part.begin(), part.end());
    }
    return run_words(words);
  }

  /// Ranks that a shell starts as `line` says, where $distmoe is the command with its words. Each
  /// leaves its exit code in a file: mpirun does not tell them apart.
  CommandResult run_line(int num_ranks, const std::string& line, const Words& more) {
    Words words = mpirun(num_ranks, {"--enable-recovery"});
    std::string distmoe;
    const Words own = context(num_ranks, more);
    for (auto word = own.begin() + 2; word != own.end(); ++word) distmoe += " " + *word;
    words.insert(words.end(), {"sh", "-c",
                               "distmoe='" + distmoe + "'; (" + line + "); echo $? > " +
                                   file("exit").string() + "$OMPI_COMM_WORLD_RANK"});
    return run_words(words);
  }

  void expect_exit_codes(int num_ranks, int exit_code) const {
    for (int rank = 0; rank < num_ranks; ++rank) {
      const fs::path path = file("exit" + std::to_string(rank));
      EXPECT_EQ(read_file(path), std::to_string(exit_code) + "\n") << "rank " << rank;
      fs::remove(path);
    }
  }

  fs::path checkpoint_;
};

std::size_t count_of(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST_F(RunMpi, PrintsOneReport) {
  const CommandResult result = run_mpi(3, checkpoint_, {"--layer", "0", "--json"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.json()["ranks"], 3);
  EXPECT_EQ(result.json()["engine"], "mpi");
}

TEST_F(RunMpi, TakesTheNumberOfRanksFromTheLauncher) {
  EXPECT_EQ(run_mpi(2, checkpoint_, {"--layer", "0", "--ranks", "2"}).exit_code, 0);
  const CommandResult result =
      run_mpi(2, checkpoint_, {"--layer", "0", "--ranks", "3", "--output", file("y")});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(count_of(result.error, "--ranks is 3, but the launcher started 2 ranks"), 1u)
      << result.error;
  EXPECT_EQ(result.output.find("relative L2"), std::string::npos) << result.output;
  expect_no_output("y");
}

TEST_F(RunMpi, EndsAlikeOnAllRanksAndSaysWhyOnce) {
  const CommandResult outside =
      run_mpi(2, checkpoint_, {"--layer", "0", "--tolerance", "1e-9", "--output", file("y")});
  EXPECT_EQ(outside.exit_code, 1);
  EXPECT_EQ(count_of(outside.error, "outside the tolerance"), 1u) << outside.error;
  EXPECT_EQ(count_of(outside.output, "relative L2"), 1u) << outside.output;
  fs::remove(file("y"));

  SampleInput(3, 1, 256, {3, 99, 4}).write(file("input"));
  const CommandResult ids =
      run_mpi(3, checkpoint_, {"--layer", "0", "--input", file("input"), "--output", file("y")});
  EXPECT_EQ(ids.exit_code, 2);
  EXPECT_EQ(count_of(ids.error, "invalid_argument"), 1u) << ids.error;

  SampleInput(4, 1, 256, {3, 3, 3, 3}).write(file("input"));
  const CommandResult rows = run_mpi(
      2, checkpoint_,
      {"--layer", "0", "--input", file("input"), "--device-factor", "1", "--output", file("y")});
  EXPECT_EQ(rows.exit_code, 3);
  EXPECT_EQ(count_of(rows.error, "capacity_exceeded"), 1u) << rows.error;
  expect_no_output("y");

  const CommandResult unprinted = run_line(2, "exec $distmoe > /dev/full", {"--output", file("y")});
  expect_exit_codes(2, 3);
  EXPECT_EQ(count_of(unprinted.error, "distmoe: "), 1u) << unprinted.error;
  EXPECT_EQ(count_of(unprinted.error, "cannot write to stdout"), 1u) << unprinted.error;
  expect_no_output("y");
}

// 2.2 GB are planned: the limit leaves room for the process alone.
TEST_F(RunMpi, RanksThatCannotCreateAContextEndAlikeAndSayWhyOnce) {
#if defined(DISTMOE_SANITIZED)
  GTEST_SKIP() << "a sanitizer needs more address space than any limit that the plan exceeds";
#endif
  constexpr std::int64_t kTokens = 50000;
  SampleInput(kTokens, 16, 256, std::vector<std::int64_t>(kTokens * 16, 3)).write(file("input"));
  for (const std::string who : {"[ $OMPI_COMM_WORLD_RANK = 1 ]", "true"}) {
    SCOPED_TRACE(who);
    const CommandResult result =
        run_line(2, "if " + who + "; then ulimit -v 2000000; fi; exec $distmoe",
                 {"--input", file("input"), "--output", file("y")});
    expect_exit_codes(2, 3);
    EXPECT_EQ(count_of(result.error, "distmoe: "), 1u) << result.error;
    EXPECT_EQ(count_of(result.error, "distmoe: out_of_memory"), 1u) << result.error;
    EXPECT_EQ(result.output, "");
    expect_no_output("y");
  }
}

TEST_F(RunMpi, OneUnfitRankEndsAllRanks) {
  SampleInput(3, 1, 256, {3, 7, 4}).write(file("input"));
  const CommandResult result =
      run_different({"--output", file("y")}, {"--input", file("missing"), "--output", file("y")});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(count_of(result.error, "distmoe: "), 1u) << result.error;
  EXPECT_NE(result.error.find("missing"), std::string::npos) << result.error;
  expect_no_output("y");
}

TEST_F(RunMpi, RanksThatWereStartedDifferentlyGetPeerMismatch) {
  for (const auto& [first, second] : {std::pair<Words, Words>{{}, {"--repeat", "2"}},
                                      {{}, {"--tokens-per-rank", "500,12"}},
                                      {{}, {"--output", file("y")}},
                                      {{"--device-factor", "2"}, {"--device-factor", "1.5"}}}) {
    const CommandResult result = run_different(first, second);
    EXPECT_EQ(result.exit_code, 3) << result.error;
    EXPECT_EQ(count_of(result.error, "distmoe: "), 1u) << result.error;
    EXPECT_EQ(count_of(result.error, "distmoe: peer_mismatch"), 1u) << result.error;
    EXPECT_EQ(result.output.find("relative L2"), std::string::npos) << result.output;
    expect_no_output("y");
  }
}

/// A long run of three ranks, of which one is stopped or killed on the way.
class LostRank : public RunMpi {
 protected:
  using Clock = std::chrono::steady_clock;

  /// Every rank but `victim` leaves its exit code in a file: mpirun does not tell them apart.
  Words long_run(int victim, const Words& mpirun_words) const {
    const std::string command =
        command_path() + " run --engine mpi --checkpoint " + checkpoint_.string() +
        " --layer 0 --timeout 2 --repeat 10000 --output " + file("y").string();
    const std::string script = "if [ $OMPI_COMM_WORLD_RANK = " + std::to_string(victim) +
                               " ]; then exec " + command + "; fi; " + command + "; code=$?; " +
                               "echo $code > " + file("exit").string() +
                               "$OMPI_COMM_WORLD_RANK; exit $code";
    Words words = mpirun(3, mpirun_words);
    words.insert(words.end(), {"sh", "-c", script});
    return words;
  }

  /// The process of each rank, once all of them are in the middle of their calls.
  std::map<int, pid_t> find_ranks() const {
    std::map<int, pid_t> ranks;
    for (int attempt = 0; attempt < 200 && ranks.size() < 3; ++attempt) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (const auto& entry : fs::directory_iterator("/proc")) {
        const std::string name = entry.path().filename();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string arguments = read_file(entry.path() / "cmdline");
        if (arguments.rfind(command_path(), 0) != 0) continue;
        if (arguments.find(file("y")) == std::string::npos) continue;
        const int rank = rank_in(read_file(entry.path() / "environ"));
        if (rank >= 0) ranks[rank] = std::stoi(name);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return ranks;
  }

  void expect_peer_lost(const CommandResult& result, int victim, Clock::time_point lost_at) const {
    // mpirun itself needs a second or two to end a job.
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - lost_at).count(), 6.0);
    EXPECT_NE(result.error.find("peer_lost"), std::string::npos) << result.error;
    EXPECT_TRUE(names_absent_rank(result.error, victim)) << result.error;
    EXPECT_EQ(result.output.find("relative L2"), std::string::npos) << result.output;
    expect_no_output("y");
  }

 private:
  static int rank_in(const std::string& environment) {
    const std::string key = "OMPI_COMM_WORLD_RANK=";
    const auto at = environment.find(key);
    return at == std::string::npos ? -1 : std::stoi(environment.substr(at + key.size()));
  }
};

TEST_F(LostRank, ThatStopsAnsweringEndsTheOthersWithinTheTimeout) {
  Process process(long_run(1, {}), folder_);
  const std::map<int, pid_t> ranks = find_ranks();
  ASSERT_EQ(ranks.size(), 3u);
  const auto lost_at = Clock::now();
  kill(ranks.at(1), SIGSTOP);
  const CommandResult result = process.wait(std::chrono::seconds(30));
  EXPECT_EQ(result.exit_code, 3) << result.error;
  expect_peer_lost(result, 1, lost_at);
}

// mpirun ends a job whose rank died, unless it is told to go on.
TEST_F(LostRank, ThatDiesEndsTheOthersWithinTheTimeout) {
  for (const int victim : {2, 0}) {
    Process process(long_run(victim, {"--enable-recovery"}), folder_);
    const std::map<int, pid_t> ranks = find_ranks();
    ASSERT_EQ(ranks.size(), 3u);
    const auto lost_at = Clock::now();
    kill(ranks.at(victim), SIGKILL);
    expect_peer_lost(process.wait(std::chrono::seconds(30)), victim, lost_at);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(read_file(file("exit" + std::to_string(rank))), "3\n") << "rank " << rank;
      fs::remove(file("exit" + std::to_string(rank)));
    }
  }
}

}  // namespace
}  // namespace distmoe::tools
