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
#include "distmoe/tensor.hpp"

namespace distmoe::conformance {

enum class Engine { kThreads };

struct MoeCase {
  BackendKind backend = BackendKind::kCpu;
  Engine engine = Engine::kThreads;
  int ranks = 1;
  int num_threads = 1;  ///< worker threads of a rank
  Combine combine = Combine::kPerRoute;
  std::vector<int> devices{};  ///< CUDA: of every rank
  Precision precision = Precision::kBF16;
  Pipeline pipeline = Pipeline::kStaged;
  bool is_prepared = false;  ///< weights, before the call; those of NVFP4 always are
};

/// "cpu_threads_P3_w2_per_route", "cuda_threads_P3_on_010_per_rank",
/// "cpu_threads_P2_w1_per_route_mxfp8_mega_prepared": also the name of the test case.
std::string name_of(const MoeCase& moe_case);
inline std::ostream& operator<<(std::ostream& out, const MoeCase& c) { return out << name_of(c); }
inline std::string case_name(const testing::TestParamInfo<MoeCase>& info) {
  return name_of(info.param);
}

/// One rank of the case's backend, in its precision.
MoeCase single_rank_of(const MoeCase& moe_case);
/// The case with another number of ranks, which take turns on its devices.
MoeCase with_ranks(MoeCase moe_case, int ranks);

/// Where the tensors of a rank are.
Device device_of(const MoeCase& moe_case, int rank);

/// Where the contract of the case's backend is another than the CPU's, which the laws state: what
/// design.md 3, 7 and 9 and docs/errors.md say of a GPU.
struct BackendContract {
  /// A call throws what its device finds, and nothing of a failed one is written. Else check()
  /// throws it, and y of a failed call is NaN.
  bool host_waits = true;
  /// Calls meet over the communicator: a host that meets a fault there, or arguments that it
  /// refuses, has words for its peers, and contexts called in different orders are told apart. Else
  /// peers hear which rank it was, and a call that finds no partner ends by its timeout.
  bool calls_ask_the_communicator = true;
  /// Widths, and the beginnings of rows of x, y and weights, are multiples of as many elements; a
  /// row that begins elsewhere is `unsupported`, by name.
  std::int64_t row_step = 1;
  bool trains = true;                  ///< in the case's precision
  const char* memory = "host memory";  ///< where tensors must be, in messages
};
BackendContract contract_of(const MoeCase& moe_case);

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
/// The low precisions of the backend, P = 1 to 4, both pipelines: for laws that hold bit by bit
/// whatever the arithmetic.
std::vector<MoeCase> coded_cases();
/// Those of them with two ranks and more and per_route.
std::vector<MoeCase> coded_group_cases();
/// Those of them that train.
std::vector<MoeCase> coded_training_cases();
/// One rank and a few, with several threads: for laws about contexts that come and go.
std::vector<MoeCase> lifetime_cases();
/// Two ranks and more: for laws about peers.
std::vector<MoeCase> group_cases();
/// One for each kind of device, for reports that say themselves how many ranks there were.
std::vector<MoeCase> report_cases();

/// Runs `body` on every rank of the case's engine that this process has.
void run_group(const MoeCase& moe_case,
               const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace distmoe::conformance
