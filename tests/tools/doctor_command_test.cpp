// SPDX-License-Identifier: Apache-2.0
// Invariant: `distmoe doctor` ends, whatever is missing or broken, says what runs and what to do,
// and its exit code says whether what was tried, and what was required, gave right results.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "command_testing.hpp"

namespace distmoe::tools {
namespace {

namespace fs = std::filesystem;

class DoctorCommand : public CommandTest {
 protected:
  /// Without a GPU. `environment` holds NAME=value.
  CommandResult doctor(const Words& more, const Words& environment = {},
                       const std::string& program = command_path()) {
    Words words{"env", "CUDA_VISIBLE_DEVICES="};
    words.insert(words.end(), environment.begin(), environment.end());
    words.insert(words.end(), {program, "doctor"});
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }

  /// A folder with an `mpirun` that runs `script`, before all others on the path.
  std::string path_with_mpirun(const std::string& script) {
    const fs::path folder = file("bin");
    fs::create_directories(folder);
    std::ofstream(folder / "mpirun") << "#!/bin/sh\n" << script;
    chmod((folder / "mpirun").c_str(), 0755);
    return "PATH=" + folder.string() + ":/usr/bin:/bin";
  }

  static nlohmann::json path_of(const nlohmann::json& report, const std::string& backend,
                                const std::string& engine) {
    for (const auto& path : report["paths"]) {
      if (path["backend"] == backend && path["engine"] == engine) return path;
    }
    ADD_FAILURE() << "no path " << backend << " over " << engine << " in " << report;
    return {};
  }

  static std::string advice_of(const nlohmann::json& report) { return report["advice"].dump(); }
};

TEST_F(DoctorCommand, WithoutAGpuTheCpuIsCheckedOverEveryEngine) {
  const CommandResult result = doctor({"--json", "--require", "cpu", "threads", "tcp"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  const auto report = result.json();
  EXPECT_EQ(report["sound"], true);
  EXPECT_GT(report["machine"]["usable_cores"], 0);
  EXPECT_TRUE(report["gpu"]["devices"].empty());
  for (const char* engine : {"threads", "tcp"}) {
    const auto path = path_of(report, "cpu", engine);
    EXPECT_EQ(path["runs"], true) << path;
    EXPECT_NE(path["detail"].dump().find("correct: forward and backward on 2 rank(s)"),
              std::string::npos)
        << path;
  }
  EXPECT_EQ(path_of(report, "cpu", "mpi")["runs"], mpi_problem().empty());
  EXPECT_EQ(path_of(report, "cuda", "threads")["runs"], false);
  EXPECT_EQ(path_of(report, "cuda", "threads")["tried"], false);
}

TEST_F(DoctorCommand, SaysInWordsWhatRunsAndWhatDoesNot) {
  const CommandResult result = doctor({});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  for (const char* part : {"found\n", "will run\n", "cpu over threads", "will not run\n",
                           "cuda over threads", "vector instructions", "driver"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part << '\n' << result.output;
  }
}

TEST_F(DoctorCommand, WhatIsRequiredAndMissingExitsWith3AfterTheReport) {
  const CommandResult result = doctor({"--json", "--require", "cuda"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("cuda does not run here: "), std::string::npos) << result.error;
  EXPECT_EQ(result.json()["sound"], true);
}

TEST_F(DoctorCommand, WithoutTheMpiModuleItSaysWhatToInstall) {
  // A copy of the program elsewhere does not find the module of the build.
  fs::copy_file(command_path(), file("distmoe"));
  const CommandResult result = doctor({"--json"}, {}, file("distmoe"));
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const auto report = result.json();
  EXPECT_EQ(path_of(report, "cpu", "mpi")["tried"], false);
  EXPECT_EQ(path_of(report, "cpu", "threads")["runs"], true);
  EXPECT_NE(advice_of(report).find("--engine mpi"), std::string::npos) << report;
  EXPECT_NE(advice_of(report).find("openmpi"), std::string::npos) << report;
}

TEST_F(DoctorCommand, ALauncherThatFailsIsAFindingAndExitsWith3) {
  if (const std::string problem = mpi_problem(); !problem.empty()) GTEST_SKIP() << problem;
  const CommandResult result = doctor(
      {"--json"}, {path_with_mpirun(
                      "case $1 in --version) echo fake MPI;; *) echo no slots; exit 9;; esac\n")});
  EXPECT_EQ(result.exit_code, 3);
  const auto report = result.json();
  EXPECT_EQ(report["sound"], false);
  EXPECT_EQ(path_of(report, "cpu", "mpi")["detail"], "no slots");
  EXPECT_EQ(path_of(report, "cpu", "tcp")["runs"], true);
}

TEST_F(DoctorCommand, WithoutALauncherMpiIsNotTried) {
  const CommandResult result =
      doctor({"--json"}, {path_with_mpirun("echo broken installation >&2; exit 1\n")});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(path_of(result.json(), "cpu", "mpi")["tried"], false);
}

#if defined(DISTMOE_FAKE_NCCL)
TEST_F(DoctorCommand, AWrongNcclLibraryIsNamedInPlainWords) {
  std::ofstream(file("text")) << "no library\n";
  const std::string folder = folder_.string();
  for (const auto& [named, reason] :
       {std::pair<std::string, std::string>{folder, "which is a folder"},
        {folder + "/none", "and there is no such file"},
        {folder + "/text", "which does not load ("}}) {
    const CommandResult result = doctor({"--json"}, {"DISTMOE_NCCL_LIBRARY=" + named});
    ASSERT_EQ(result.exit_code, 0) << result.error;
    for (const auto& finding : result.json()["findings"]) {
      if (finding["subject"] != "NCCL") continue;
      EXPECT_EQ(finding["verdict"], "broken");
      const std::string detail = finding["detail"];
      EXPECT_NE(detail.find("DISTMOE_NCCL_LIBRARY names \"" + named + "\", " + reason),
                std::string::npos)
          << detail;
      EXPECT_NE(detail.find("set it to the file libnccl.so.2"), std::string::npos) << detail;
    }
  }
}

TEST_F(DoctorCommand, AnNcclThatIsTooOldIsNamedWithItsVersion) {
  const CommandResult result =
      doctor({"--json"},
             {std::string("DISTMOE_NCCL_LIBRARY=") + DISTMOE_FAKE_NCCL, "FAKE_NCCL_VERSION=21805"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  const auto report = result.json();
  EXPECT_NE(report["findings"].dump().find("is NCCL 2.18.5; 2.28.0 or later is needed"),
            std::string::npos)
      << report["findings"];
  EXPECT_NE(advice_of(report).find("NCCL 2.28 or later"), std::string::npos) << report;
}
#endif

TEST_F(DoctorCommand, WrongArgumentsExitWith2) {
  for (const Words& words : {Words{"--require", "gpu"}, Words{"--engine", "tcp"},
                             Words{"--self-check", "--ranks", "9"}}) {
    const CommandResult result = doctor(words);
    EXPECT_EQ(result.exit_code, 2) << words.front();
    EXPECT_EQ(result.output, "");
  }
}

TEST_F(DoctorCommand, ASelfCheckNamesItsRanks) {
  const CommandResult result = doctor({"--self-check", "--ranks", "5"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("on 5 rank(s) (threads, cpu)"), std::string::npos) << result.output;
}

}  // namespace
}  // namespace distmoe::tools
