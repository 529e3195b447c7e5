// SPDX-License-Identifier: Apache-2.0
//
// Invariant: an NCCL that never ends, fails or does not let itself be aborted costs every rank a
// bounded time and an error. The library of these cases is a fake; the GPUs are real, because the
// engine asks them who they are. Ranks are two processes, which two_ranks_main.cpp starts.
#include <gtest/gtest.h>

#include <cstdlib>

#include "backend/backend.hpp"
#include "backend/cuda/device.hpp"
#include "comm/communicator_laws.hpp"

namespace distmoe {
namespace {

using laws::Outcome;
using std::chrono::milliseconds;

class NcclWatchdog : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda::why_unavailable(); !reason.empty()) {
      GTEST_SKIP() << "no CUDA device: " << reason;
    }
    if (cuda::device_count() < 2) GTEST_SKIP() << "two ranks need two GPUs";
    setenv("DISTMOE_NCCL_LIBRARY", DISTMOE_FAKE_NCCL, 1);
  }
  void TearDown() override {
    unsetenv("FAKE_NCCL_INIT");
    unsetenv("FAKE_NCCL_ABORT");
  }

  /// `use` gets a communicator that was made with 500 ms.
  static void expect_error_of(
      ErrorCode code, const std::string& words, double seconds,
      void (*use)(Communicator&) = [](Communicator&) {}) {
    const auto host = make_tcp_communicator(torchrun_group(), laws::kPatient);
    const Outcome outcome = laws::outcome_of(
        [&] { use(*make_nccl_communicator(host, host->rank(), milliseconds(500))); });
    laws::expect_error(outcome, code, {words});
    EXPECT_LT(outcome.seconds, seconds);
    host->barrier(laws::kPatient);
  }
};

TEST_F(NcclWatchdog, ACommunicatorThatIsNeverReadyIsAborted) {
  setenv("FAKE_NCCL_INIT", "hang", 1);
  expect_error_of(ErrorCode::kPeerLost, "ncclCommInitRankConfig did not end within 500 ms", 2.0);
}

TEST_F(NcclWatchdog, AnAbortThatNeverReturnsIsLeftAlone) {
  setenv("FAKE_NCCL_INIT", "hang", 1);
  setenv("FAKE_NCCL_ABORT", "hang", 1);
  expect_error_of(ErrorCode::kPeerLost, "did not end within 500 ms", 7.0);
}

TEST_F(NcclWatchdog, AFailureHasTheWordsOfNccl) {
  setenv("FAKE_NCCL_INIT", "fail", 1);
  expect_error_of(ErrorCode::kDeviceFault, "fake error from ncclCommInitRankConfig", 2.0);
}

TEST_F(NcclWatchdog, MemoryThatCannotBeHadIsAnErrorOfAllRanks) {
  expect_error_of(ErrorCode::kOutOfMemory, "needs 4096 bytes", 2.0, [](Communicator& group) {
    const cuda::DeviceScope scope(group.rank());
    group.symmetric_memory()->allocate(4096);
  });
}

}  // namespace
}  // namespace distmoe
