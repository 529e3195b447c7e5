// SPDX-License-Identifier: Apache-2.0
// Invariant: with torchrun's variables alone, without MPI, one rank speaks and writes, all ranks
// exit alike, a lost rank is named in time, and what cannot be run says why once, with what can.
#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <thread>

#include "backend/backend.hpp"
#include "comm/nccl_engine.hpp"
#include "comm/tcp_group.hpp"
#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

class RunTorchrun : public CommandTest {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint_folder("qwen3moe");
    if (checkpoint_.empty()) GTEST_SKIP() << "no checkpoint qwen3moe";
  }

  /// Starts the ranks of one job; each has a folder of its own for what it says.
  std::vector<std::unique_ptr<Process>> start(int num_ranks, const Words& more) {
    const int port = free_port();
    std::vector<std::unique_ptr<Process>> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      Words words{"env",
                  "RANK=" + std::to_string(rank),
                  "LOCAL_RANK=" + std::to_string(rank),
                  "WORLD_SIZE=" + std::to_string(num_ranks),
                  "MASTER_ADDR=127.0.0.1",
                  "MASTER_PORT=" + std::to_string(port - 1),
                  command_path(),
                  "run",
                  "--checkpoint",
                  checkpoint_.string(),
                  "--layer",
                  "0"};
      words.insert(words.end(), more.begin(), more.end());
      const fs::path own = file("rank" + std::to_string(rank));
      fs::create_directories(own);
      ranks.push_back(std::make_unique<Process>(words, own));
    }
    return ranks;
  }

  std::vector<CommandResult> run_ranks(int num_ranks, const Words& more) {
    std::vector<CommandResult> results;
    for (const auto& rank : start(num_ranks, more)) results.push_back(rank->wait());
    return results;
  }

  /// All exit with `exit_code`, and exactly one says `words`.
  static void expect_failure(const std::vector<CommandResult>& results, int exit_code,
                             const std::string& words) {
    std::string errors;
    for (const CommandResult& result : results) {
      EXPECT_EQ(result.exit_code, exit_code) << result.error;
      EXPECT_EQ(result.output, "");
      errors += result.error;
    }
    const auto at = errors.find(words);
    ASSERT_NE(at, std::string::npos) << errors;
    EXPECT_EQ(errors.find(words, at + 1), std::string::npos) << errors;
  }

  fs::path checkpoint_;
};

TEST_F(RunTorchrun, PrintsOneReportAndWritesTheBitsOfThreads) {
  const std::vector<CommandResult> results =
      run_ranks(3, {"--engine", "tcp", "--json", "--output", file("tcp")});
  for (const CommandResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(results[0].json()["ranks"], 3);
  EXPECT_EQ(results[0].json()["engine"], "tcp");
  EXPECT_EQ(results[1].output + results[2].output, "");
  EXPECT_EQ(
      run(checkpoint_, {"--layer", "0", "--ranks", "3", "--output", file("threads")}).exit_code, 0);
  EXPECT_EQ(read_file(file("tcp")), read_file(file("threads")));
}

TEST_F(RunTorchrun, EndsAlikeOnAllRanksAndSaysWhyOnce) {
  expect_failure(run_ranks(2, {"--engine", "tcp", "--ranks", "3"}), 2,
                 "--ranks is 3, but the launcher started 2 ranks");
  expect_failure(run_ranks(2, {"--engine", "tcp", "--backend", "cuda"}), 2,
                 "--backend cuda runs several ranks with --engine nccl");
}

TEST_F(RunTorchrun, NamesTheRankThatNeverStarts) {
  const CommandResult result =
      run_words({"env", "RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                 "MASTER_PORT=" + std::to_string(free_port() - 1), command_path(), "run",
                 "--checkpoint", checkpoint_, "--layer", "0", "--engine", "tcp", "--timeout", "1"});
  expect_failure({result}, 3, "peer_lost: rank 0 of 2: rank 1 did not come");
  EXPECT_LT(result.elapsed.count(), 4.0);
}

TEST_F(RunTorchrun, SaysWhichVariableIsMissing) {
  expect_failure({run_words({"env", "-u", "WORLD_SIZE", command_path(), "run", "--checkpoint",
                             checkpoint_, "--layer", "0", "--engine", "tcp"})},
                 2, "WORLD_SIZE is not set");
}

TEST_F(RunTorchrun, ALostRankEndsTheOthersWithinTheTimeout) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    for (const int victim : {0, 2}) {
      SCOPED_TRACE(testing::Message() << "signal " << signal << " for rank " << victim);
      const auto ranks = start(3, {"--engine", "tcp", "--timeout", "2", "--repeat", "10000",
                                   "--output", file("y").string()});
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      const auto begin = std::chrono::steady_clock::now();
      kill(ranks[static_cast<std::size_t>(victim)]->pid(), signal);
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        const CommandResult result = ranks[static_cast<std::size_t>(rank)]->wait();
        EXPECT_EQ(result.exit_code, 3) << result.error;
        EXPECT_NE(result.error.find("peer_lost"), std::string::npos) << result.error;
        EXPECT_TRUE(names_absent_rank(result.error, victim)) << result.error;
      }
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
      EXPECT_FALSE(fs::exists(file("y")));
    }
  }
}

// --- the NCCL engine where it cannot run ---

TEST_F(RunTorchrun, NcclIsForGpus) {
  expect_failure({run(checkpoint_, {"--layer", "0", "--engine", "nccl"})}, 2,
                 "it needs --backend cuda");
}

TEST_F(RunTorchrun, NcclSaysOnceWhyItCannotRun) {
  if (nccl_engine_problem().empty() && cuda::why_unavailable().empty()) {
    GTEST_SKIP() << "it runs here";
  }
  expect_failure(run_ranks(2, {"--engine", "nccl", "--backend", "cuda"}), 3,
                 "unsupported: the NCCL engine");
  if (!mpi_problem().empty()) return;
  Words words = mpirun(2);
  for (const std::string& word :
       {command_path(), std::string("run"), std::string("--engine"), std::string("nccl"),
        std::string("--backend"), std::string("cuda"), std::string("--checkpoint"),
        checkpoint_.string(), std::string("--layer"), std::string("0")}) {
    words.push_back(word);
  }
  expect_failure({run_words(words)}, 3, "unsupported: the NCCL engine");
}

#if defined(DISTMOE_FAKE_NCCL)
TEST_F(RunTorchrun, InfoSaysWhatIsWrongWithALibrary) {
  const auto info = [&](const std::string& library, const std::string& version) {
    return run_words({"env", "DISTMOE_NCCL_LIBRARY=" + library, "FAKE_NCCL_VERSION=" + version,
                      command_path(), "info"})
        .output;
  };
  const auto expect_words = [](const std::string& text, const std::string& words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  expect_words(info(DISTMOE_FAKE_NCCL, "22809"), "nccl: runs here (");
  expect_words(info(DISTMOE_FAKE_NCCL, "22809"), "NCCL 2.28.9 from " DISTMOE_FAKE_NCCL);
  expect_words(info(DISTMOE_FAKE_NCCL, "22707"), "nccl: does not run here (" DISTMOE_FAKE_NCCL
                                                 " is NCCL 2.27.7; 2.28.0 or later is needed)");
  expect_words(info(DISTMOE_FAKE_NCCL, "22902"), "(NCCL 2.29.2) has no ncclGetPeerDevicePointer");
  expect_words(info("/nowhere/libnccl.so.2", "0"),
               "DISTMOE_NCCL_LIBRARY names \"/nowhere/libnccl.so.2\", and there is no such file");
  expect_words(info("libm.so.6", "0"), "has no ncclGetVersion, so that it is no NCCL");
}
#endif

}  // namespace
}  // namespace distmoe::tools
