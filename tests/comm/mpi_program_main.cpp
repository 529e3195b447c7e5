// SPDX-License-Identifier: Apache-2.0
//
// The main of a test program that runs under mpirun: every rank writes its verdict into
// $DISTMOE_TEST_RECORDS/<rank>, which run_mpi.sh reads.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace {

/// Registered before MPI is initialised, so that it runs after the engine has left MPI.
void record_verdict() {
  const char* records = std::getenv("DISTMOE_TEST_RECORDS");
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (records == nullptr || rank == nullptr) return;
  const auto* test = ::testing::UnitTest::GetInstance();
  const bool has_passed = test->Passed() && test->successful_test_count() > 0;
  std::ofstream(std::string(records) + "/" + rank) << (has_passed ? "passed" : "failed");
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::atexit(record_verdict);
  return RUN_ALL_TESTS();
}
