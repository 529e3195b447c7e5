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

TEST(MpiEngine, IsUnsupportedWithoutItsModule) {
  constexpr const char* kIsCopy = "DISTMOE_TEST_IS_COPY";
  if (std::getenv(kIsCopy) == nullptr) {
    // Runs this very case again, in a copy of the program that lies in a folder of its own.
    std::string folder = fs::temp_directory_path() / "distmoe-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    const fs::path copy = fs::path(folder) / "program";
    fs::copy_file("/proc/self/exe", copy);
    const std::string command = std::string(kIsCopy) + "=1 " + copy.string() +
                                " --gtest_filter=*IsUnsupportedWithoutItsModule --gtest_brief=1";
    EXPECT_EQ(std::system(command.c_str()), 0);
    fs::remove_all(folder);
    return;
  }
  if (mpi_engine_problem().empty())
    GTEST_SKIP() << "an installed " << kMpiModuleFile << " is found";
  const auto outcome = laws::outcome_of([] { make_mpi_communicator(); });
  laws::expect_error(outcome, ErrorCode::kUnsupported,
                     {"the MPI engine cannot be loaded", kMpiModuleFile});
}

}  // namespace
}  // namespace distmoe
