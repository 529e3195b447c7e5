// SPDX-License-Identifier: Apache-2.0
//
// Invariant: where the MPI module is not there, asking for it is an ordinary error that says why.
#include "comm/mpi_engine.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "comm/communicator_laws.hpp"

namespace distmoe {
namespace {

namespace fs = std::filesystem;

#if defined(DISTMOE_HAS_MPI_MODULE)
TEST(MpiEngine, IsFoundBesideTheProgram) { EXPECT_EQ(mpi_engine_problem(), ""); }
#endif

/// Runs in a copy of this program that lies in a folder of its own.
TEST(MpiEngine, DISABLED_IsUnsupportedHere) {
  if (mpi_engine_problem().empty())
    GTEST_SKIP() << "an installed " << kMpiModuleFile << " is found";
  const auto outcome = laws::outcome_of([] { make_mpi_communicator(); });
  laws::expect_error(outcome, ErrorCode::kUnsupported,
                     {"the MPI engine cannot be loaded", kMpiModuleFile});
  EXPECT_NE(mpi_engine_problem().find(kMpiModuleFile), std::string::npos);
}

TEST(MpiEngine, IsUnsupportedWithoutItsModule) {
  std::string folder = fs::temp_directory_path() / "distmoe-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const fs::path copy = fs::path(folder) / "program";
  fs::copy_file("/proc/self/exe", copy);
  const std::string command = copy.string() +
                              " --gtest_also_run_disabled_tests"
                              " --gtest_filter=*IsUnsupportedHere --gtest_brief=1";
  EXPECT_EQ(std::system(command.c_str()), 0);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace distmoe
