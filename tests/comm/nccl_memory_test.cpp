// SPDX-License-Identifier: Apache-2.0
//
// Invariant: giving symmetric memory back takes a bounded time whatever NCCL does, and says so.
// NCCL is a fake, and so is the GPU.
#include "comm/nccl/nccl_memory.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "distmoe/log.hpp"

namespace distmoe::nccl {
namespace {

using std::chrono::milliseconds;

class NcclMemoryRelease : public testing::Test {
 protected:
  void SetUp() override {
    setenv("DISTMOE_NCCL_LIBRARY", DISTMOE_FAKE_NCCL, 1);
    setenv("FAKE_NCCL_MEMORY", "host", 1);
    set_log_sink([this](LogLevel, std::string_view line) { lines_ += std::string(line) + '\n'; });
  }
  void TearDown() override {
    set_log_sink({});
    for (const char* variable : {"FAKE_NCCL_FREE", "FAKE_NCCL_DEREGISTER", "FAKE_NCCL_ABORT"}) {
      unsetenv(variable);
    }
  }

  /// Seconds that free() of new memory takes.
  double free_seconds() {
    const auto host = make_thread_group(1).front();
    NcclGroup group(*host, 0, milliseconds(2000));
    NcclMemory memory(*host, group, milliseconds(2000));
    void* base = memory.allocate(4096);
    EXPECT_EQ(memory.peer_pointer(base, 0), base);
    const auto start = std::chrono::steady_clock::now();
    memory.free(base);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  std::string lines_;  ///< of the log
};

TEST_F(NcclMemoryRelease, IsSilentAndImmediate) {
  EXPECT_LT(free_seconds(), 2.0);
  EXPECT_EQ(lines_, "");
}

TEST_F(NcclMemoryRelease, DoesNotWaitForAFreeThatNeverReturns) {
  setenv("FAKE_NCCL_FREE", "hang", 1);
  EXPECT_LT(free_seconds(), 10.0);
  EXPECT_NE(lines_.find("ncclMemFree did not end within 5000 ms"), std::string::npos) << lines_;
}

TEST_F(NcclMemoryRelease, DoesNotWaitForADeregistrationThatNeverReturns) {
  setenv("FAKE_NCCL_DEREGISTER", "hang", 1);
  EXPECT_LT(free_seconds(), 10.0);
  EXPECT_NE(lines_.find("ncclCommWindowDeregister did not end within"), std::string::npos)
      << lines_;
}

}  // namespace
}  // namespace distmoe::nccl
