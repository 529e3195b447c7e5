// SPDX-License-Identifier: Apache-2.0
//
// Invariant: the MPI engine heeds the thread level with which a program initialised MPI: below
// MPI_THREAD_SERIALIZED it calls MPI on the thread that initialised it and on no other. Runs under
// mpirun (run_mpi.sh), one case a run, because a process initialises MPI once.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "comm/communicator_laws.hpp"

namespace distmoe {
namespace {

using laws::CommunicatorPtr;
using laws::Outcome;

template <typename Call>
Outcome outcome_on_another_thread(const Call& call) {
  Outcome outcome;
  std::thread([&] { outcome = laws::outcome_of(call); }).join();
  return outcome;
}

void check_only_the_main_thread(int level, const std::string& name) {
  int provided = -1;
  MPI_Init_thread(nullptr, nullptr, level, &provided);
  ASSERT_EQ(provided, level);
  const auto make = [] { make_mpi_communicator(); };
  laws::expect_error(outcome_on_another_thread(make), ErrorCode::kUnsupported,
                     {name, "MPI_THREAD_SERIALIZED"});
  {
    const CommunicatorPtr communicator = make_mpi_communicator();
    communicator->barrier(laws::kPatient);
    const auto call = [&] { communicator->barrier(laws::kPatient); };
    laws::expect_error(outcome_on_another_thread(call), ErrorCode::kUnsupported,
                       {name, "MPI_THREAD_SERIALIZED"});
    laws::expect_error(outcome_on_another_thread(make), ErrorCode::kUnsupported, {name});
    const auto ranks = laws::all_gather(*communicator, communicator->rank());
    EXPECT_EQ(ranks.back(), communicator->size() - 1);
  }
  MPI_Finalize();
}

TEST(MpiThreadLevel, SingleIsForTheMainThread) {
  check_only_the_main_thread(MPI_THREAD_SINGLE, "MPI_THREAD_SINGLE");
}
TEST(MpiThreadLevel, FunneledIsForTheMainThread) {
  check_only_the_main_thread(MPI_THREAD_FUNNELED, "MPI_THREAD_FUNNELED");
}

TEST(MpiThreadLevel, SerializedIsForAnyThread) {
  int provided = -1;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  ASSERT_GE(provided, MPI_THREAD_SERIALIZED);
  std::thread([] {
    const CommunicatorPtr communicator = make_mpi_communicator();
    const auto ranks = laws::all_gather(*communicator, communicator->rank());
    EXPECT_EQ(ranks.back(), communicator->size() - 1);
  }).join();
  make_mpi_communicator()->barrier(laws::kPatient);
  MPI_Finalize();
}

}  // namespace
}  // namespace distmoe
