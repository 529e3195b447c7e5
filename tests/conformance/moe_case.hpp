// SPDX-License-Identifier: Apache-2.0
//
// What the laws are instantiated for. A backend, an engine or a machine is added here.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "distmoe/communicator.hpp"
#include "distmoe/config.hpp"
#include "distmoe/context.hpp"

namespace distmoe::conformance {

enum class Engine { kThreads };

struct MoeCase {
  BackendKind backend = BackendKind::kCpu;
  Engine engine = Engine::kThreads;
  int ranks = 1;
  int num_threads = 1;  ///< worker threads of a rank
  Combine combine = Combine::kPerRoute;
  std::vector<int> devices{};  ///< CUDA: of every rank
};

/// "cpu_threads_P3_w2_per_route", "cuda_threads_P3_on_010_per_rank": also the name of the test
/// case.
std::string name_of(const MoeCase& moe_case);
inline std::ostream& operator<<(std::ostream& out, const MoeCase& c) { return out << name_of(c); }
inline std::string case_name(const testing::TestParamInfo<MoeCase>& info) {
  return name_of(info.param);
}

/// One rank of the case's backend.
MoeCase single_rank_of(const MoeCase& moe_case);

/// Why this machine cannot run the case; empty where it can.
std::string why_skipped(const MoeCase& moe_case);

/// A law: instantiated for cases, skipped by name where the machine lacks what its case needs.
class MoeLaw : public testing::TestWithParam<MoeCase> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_skipped(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
};

// The lists of cases: of the CPU in cpu_cases.cpp, of CUDA in cuda_cases.cpp. Laws are compiled
// once and linked with either.

/// Every case of the suite.
std::vector<MoeCase> all_cases();
/// A few P, 1 among them, with per_route: for laws that look at shapes and values rather than at
/// ranks.
std::vector<MoeCase> some_cases();
/// The same, and per_rank: for laws that look at what a sum is made of.
std::vector<MoeCase> combine_cases();
/// P = 1 to 4 with per_route: for laws of backwards.
std::vector<MoeCase> training_cases();
/// Two ranks and more: for laws about peers.
std::vector<MoeCase> group_cases();

/// Runs `body` on every rank of the case's engine that this process has.
void run_group(const MoeCase& moe_case,
               const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace distmoe::conformance
