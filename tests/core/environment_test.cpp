// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a legal value is taken, an illegal one is reported once through the log's sink with
// what is legal and ignored, and nothing but the listed variables is read. The environment is read
// once in a process, so every case runs in a child of its own.
#include "core/environment.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "core/log.hpp"

namespace distmoe {
namespace {

using testing::ExitedWithCode;

// Sets the variable and leaves the process with 0 if `holds` accepts what the library read.
template <typename Predicate>
[[noreturn]] void leave_with(const char* name, const char* value, Predicate holds) {
  setenv(name, value, 1);
  std::_Exit(holds(environment()) ? 0 : 1);
}

void expect_read(const char* name, const char* value, bool (*holds)(const Environment&)) {
  EXPECT_EXIT(leave_with(name, value, holds), ExitedWithCode(0), "^$") << name << '=' << value;
}

void expect_refused(const char* name, const char* value, bool (*is_default)(const Environment&)) {
  const std::string report =
      std::string("^distmoe warning: ") + name + "=" + value + " ignored; legal: .+\n$";
  EXPECT_EXIT(leave_with(name, value, is_default), ExitedWithCode(0), report)
      << name << '=' << value;
}

TEST(EnvironmentDeathTest, LegalValuesAreTaken) {
  expect_read("DISTMOE_LOG_LEVEL", "debug",
              [](const Environment& e) { return e.log_level == LogLevel::kDebug; });
  expect_read("DISTMOE_LOG_LEVEL", "error",
              [](const Environment& e) { return e.log_level == LogLevel::kError; });
  expect_read("DISTMOE_NUM_THREADS", "1", [](const Environment& e) { return e.num_threads == 1; });
  expect_read("DISTMOE_NUM_THREADS", "1024",
              [](const Environment& e) { return e.num_threads == 1024; });
  expect_read("DISTMOE_CPU_MATMUL", "bf16",
              [](const Environment& e) { return e.cpu_matmul == "bf16"; });
  expect_read("DISTMOE_CPU_MATMUL", "f32",
              [](const Environment& e) { return e.cpu_matmul == "f32"; });
}

TEST(EnvironmentDeathTest, IllegalThreadCountsAreReportedAndIgnored) {
  for (const char* value : {"0", "-3", "1025", "99999999999999999999", "4x", " 4", ""}) {
    expect_refused("DISTMOE_NUM_THREADS", value,
                   [](const Environment& e) { return e.num_threads == 0; });
  }
}

TEST(EnvironmentDeathTest, IllegalLogLevelsAreReportedAndIgnored) {
  for (const char* value : {"verbose", "Debug", "2", ""}) {
    expect_refused("DISTMOE_LOG_LEVEL", value,
                   [](const Environment& e) { return e.log_level == LogLevel::kWarning; });
  }
}

TEST(EnvironmentDeathTest, IllegalMatmulChoicesAreReportedAndIgnored) {
  for (const char* value : {"fp32", "BF16", ""}) {
    expect_refused("DISTMOE_CPU_MATMUL", value,
                   [](const Environment& e) { return e.cpu_matmul.empty(); });
  }
}

TEST(Environment, SaysWhatTheLauncherSaysNow) {
  for (const EnvironmentVariable& variable : launcher_variables()) unsetenv(variable.name);
  EXPECT_EQ(launcher_environment().rank, "");
  setenv("RANK", "3", 1);
  setenv("WORLD_SIZE", "4", 1);
  setenv("MASTER_ADDR", "node", 1);
  setenv("MASTER_PORT", "29500", 1);
  setenv("TORCHELASTIC_RUN_ID", "run", 1);
  setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
  const LauncherEnvironment launcher = launcher_environment();
  EXPECT_EQ(launcher.rank, "3");
  EXPECT_EQ(launcher.world_size, "4");
  EXPECT_EQ(launcher.master_addr, "node");
  EXPECT_EQ(launcher.master_port, "29500");
  EXPECT_EQ(launcher.run_id, "run");
  EXPECT_EQ(launcher.local_rank, "1");
  setenv("LOCAL_RANK", "2", 1);
  EXPECT_EQ(launcher_environment().local_rank, "2");
}

TEST(Environment, LeavesMulticastToWhoHasDecidedAboutIt) {
  setenv("NCCL_NVLS_ENABLE", "2", 1);
  leave_nvlink_multicast_unused();
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "2");
  unsetenv("NCCL_NVLS_ENABLE");
  leave_nvlink_multicast_unused();
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

/// Illegal values, a sink that collects what it gets, and the first use of the library.
std::vector<std::string> lines_after(void (*use)()) {
  setenv("DISTMOE_NUM_THREADS", "0", 1);
  setenv("DISTMOE_LOG_LEVEL", "loud", 1);
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    lines.push_back((level == LogLevel::kWarning ? "warning: " : "other: ") + std::string(line));
  });
  use();
  environment();
  set_log_sink({});
  return lines;
}

TEST(EnvironmentDeathTest, AReplacedSinkGetsTheReportsOnce) {
  const std::vector<std::string> reports = {
      "warning: DISTMOE_LOG_LEVEL=loud ignored; legal: debug | info | warning | error",
      "warning: DISTMOE_NUM_THREADS=0 ignored; legal: 1..1024"};
  const auto leave_if = [](bool is_right) { std::_Exit(is_right ? 0 : 1); };
  EXPECT_EXIT(leave_if(lines_after([] { environment(); }) == reports), ExitedWithCode(0), "^$");
  std::vector<std::string> with_line = reports;
  with_line.emplace_back("other: a line");
  EXPECT_EXIT(leave_if(lines_after([] { log(LogLevel::kError, "a line"); }) == with_line),
              ExitedWithCode(0), "^$");
}

TEST(EnvironmentDeathTest, ASilencedSinkSilencesTheReports) {
  const auto use_silently = [] {
    setenv("DISTMOE_NUM_THREADS", "0", 1);
    setenv("DISTMOE_LOG_LEVEL", "loud", 1);
    set_log_sink({});
    const bool is_right = environment().num_threads == 0;
    log(LogLevel::kError, "nobody hears this");
    std::_Exit(is_right ? 0 : 1);
  };
  EXPECT_EXIT(use_silently(), ExitedWithCode(0), "^$");
}

TEST(EnvironmentDeathTest, TheDefaultSinkWritesTheReportsBeforeTheFirstLine) {
  const auto log_first = [] {
    setenv("DISTMOE_LOG_LEVEL", "loud", 1);
    log(LogLevel::kError, "e");
    environment();
    std::_Exit(0);
  };
  EXPECT_EXIT(log_first(), ExitedWithCode(0),
              "^distmoe warning: DISTMOE_LOG_LEVEL=loud ignored; legal: .+\ndistmoe error: e\n$");
}

TEST(EnvironmentDeathTest, DefaultSinkWritesFromTheLevelUpwards) {
  const auto log_all = [](const char* level) {
    setenv("DISTMOE_LOG_LEVEL", level, 1);
    log(LogLevel::kDebug, "d");
    log(LogLevel::kInfo, "i");
    log(LogLevel::kWarning, "w");
    log(LogLevel::kError, "e");
    std::_Exit(0);
  };
  EXPECT_EXIT(log_all("debug"), ExitedWithCode(0),
              "^distmoe debug: d\ndistmoe info: i\ndistmoe warning: w\ndistmoe error: e\n$");
  EXPECT_EXIT(log_all("warning"), ExitedWithCode(0), "^distmoe warning: w\ndistmoe error: e\n$");
  EXPECT_EXIT(log_all("error"), ExitedWithCode(0), "^distmoe error: e\n$");
}

TEST(Environment, EveryVariableIsListedOnceWithLegalValuesAndMeaning) {
  std::set<std::string> names;
  for (const EnvironmentVariable& variable : environment_variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_EQ(std::string(variable.name).rfind("DISTMOE_", 0), 0U) << variable.name;
    EXPECT_STRNE(variable.legal, "");
    EXPECT_STRNE(variable.meaning, "");
  }
  EXPECT_EQ(names.count("DISTMOE_NUM_THREADS"), 1U);
  for (const EnvironmentVariable& variable : launcher_variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_STRNE(variable.legal, "");
    EXPECT_STRNE(variable.meaning, "");
  }
  EXPECT_EQ(names.count("MASTER_ADDR"), 1U);
}

}  // namespace
}  // namespace distmoe
