// SPDX-License-Identifier: Apache-2.0
//
// From what was found on a machine to what will run there, what will not, and what to do about it.
// Pure functions: facts in, words out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "doctor/gpu_facts.hpp"
#include "doctor/path_checks.hpp"
#include "installation.hpp"
#include "machine.hpp"

namespace distmoe::tools {

struct DoctorFacts {
  Machine machine;
  std::vector<Component> backends;
  std::vector<Component> engines;
  GpuFacts gpu;
  LinkRate link;       ///< where there are several GPUs
  std::string mpirun;  ///< its version; empty where there is none
};

enum class Verdict {
  kFine,
  kMissing,  ///< not here; what does without it runs
  kBroken,   ///< here, and of no use as it is
};
const char* to_string(Verdict verdict) noexcept;

struct Finding {
  std::string subject;
  Verdict verdict = Verdict::kFine;
  std::string detail;
  std::string advice{};  ///< empty: nothing to do
};

/// A backend over an engine.
struct ExecutionPath {
  BackendKind backend = BackendKind::kCpu;
  Engine engine = Engine::kThreads;
  int num_ranks = 1;      ///< of its check
  std::string why_not{};  ///< why it is not even tried; empty where it is
  std::optional<CheckResult> check{};

  std::string name() const;  ///< "cpu over mpi"
  bool runs() const { return check && check->is_right; }
  /// What the check said, or why there was none.
  const std::string& outcome() const { return check ? check->words : why_not; }
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<ExecutionPath> paths;

  /// Every check that was tried gave right results.
  bool is_sound() const;
  /// What to do, each thing once.
  std::vector<std::string> advice() const;
  /// The first of `required` (names of backends and engines) that no right check used, with the
  /// reason; empty where there is none.
  std::string unmet(const std::vector<std::string>& required) const;
};

std::vector<ExecutionPath> plan_paths(const DoctorFacts& facts);

/// `paths` are plan_paths() of the facts, checked where they can be.
Diagnosis diagnose(const DoctorFacts& facts, std::vector<ExecutionPath> paths);

/// For people.
std::string text_of(const Diagnosis& diagnosis);
/// One object with the documented keys.
std::string json_of(const DoctorFacts& facts, const Diagnosis& diagnosis);

}  // namespace distmoe::tools
