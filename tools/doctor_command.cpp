// SPDX-License-Identifier: Apache-2.0
//
// `distmoe doctor`: what will run on this machine, what won't, and what to do about it.
#include <CLI/CLI.hpp>

#include "core/check.hpp"
#include "doctor/diagnosis.hpp"
#include "doctor/self_check.hpp"
#include "option_declaration.hpp"
#include "progress.hpp"
#include "run_options.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

constexpr int kMaxRanks = 8;  ///< experts of the self check
constexpr int kMaxNames = 6;

constexpr const char* kFooter =
    "Looks at processor, memory, driver, GPUs and the links between them, NCCL and MPI, then runs "
    "a small\nforward and its backward over every backend and engine that can run here and "
    "compares the results\nwith a plain computation.\n\n"
    "Exit code: 0 all that was tried gave right results and what --require names runs; 2 wrong "
    "arguments;\n3 otherwise.\n\n"
    "Examples:\n"
    "  distmoe doctor\n"
    "  distmoe doctor --json\n"
    "  distmoe doctor --require cuda nccl\n"
    "  mpirun -n 4 distmoe doctor --self-check --engine mpi\n";

DoctorFacts collect_facts(Progress& progress) {
  DoctorFacts facts;
  progress.show("looking at the machine");
  facts.machine = inspect_machine();
  facts.backends = backends();
  facts.engines = engines();
  facts.gpu = inspect_gpus();
  facts.mpirun = mpirun_version();
  if (facts.gpu.can_run() && facts.gpu.gpus.size() > 1) {
    progress.show("measuring the links between GPUs");
    const Failure failure =
        attempt([&] { facts.link = measure_link(static_cast<int>(facts.gpu.gpus.size())); });
    if (failure.happened()) facts.link.why_not = failure.message;
  }
  return facts;
}

class DoctorCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "doctor"; }
  const char* summary() const noexcept override {
    return "Check what runs on this machine, with right results, and say what to install";
  }

  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    app.add_flag("--json", json_, "Print one JSON object on stdout and nothing else");
    app.add_option_function<std::vector<std::string>>(
           "--require",
           [this](const std::vector<std::string>& names) {
             for (const std::string& name : names) {
               parse_name("--require", name, {"cpu", "cuda", "threads", "mpi", "tcp", "nccl"});
             }
             required_ = names;
           },
           "Backends and engines without which the exit code is 3")
        ->type_name("cpu|cuda|threads|mpi|tcp|nccl")
        ->expected(1, kMaxNames);
    app.add_flag("--self-check", is_self_check_,
                 "Only the check of the results, on the ranks that these options give:");
    add_engine_option(app, setup_.engine);
    add_backend_option(app, setup_.backend);
    add_count(app, "--ranks", "Ranks that are threads, up to 8 [1]", kMaxRanks,
              [this](std::int64_t value) { setup_.num_thread_ranks = static_cast<int>(value); });
    add_timeout_option(app, setup_.timeout);
    for (const char* option : {"--engine", "--backend", "--ranks", "--timeout"}) {
      app.get_option(option)->needs("--self-check");
    }
  }

  ExitCode execute() override {
    if (is_self_check_) return run_self_check(setup_);
    Progress progress(true);
    const DoctorFacts facts = collect_facts(progress);
    std::vector<ExecutionPath> paths = plan_paths(facts);
    for (ExecutionPath& path : paths) {
      if (!path.why_not.empty()) continue;
      progress.show("checking " + path.name());
      path.check = check_path(path.backend, path.engine, path.num_ranks);
    }
    progress.clear();
    const Diagnosis diagnosis = diagnose(facts, std::move(paths));
    write_stdout(json_ ? json_of(facts, diagnosis) : text_of(diagnosis));
    const std::string unmet = diagnosis.unmet(required_);
    if (!unmet.empty()) throw_error(ErrorCode::kUnsupported, unmet);
    return diagnosis.is_sound() ? ExitCode::kSuccess : ExitCode::kRuntimeFailure;
  }

 private:
  bool json_ = false;
  bool is_self_check_ = false;
  std::vector<std::string> required_;
  RankSetup setup_;
};

}  // namespace

std::unique_ptr<Subcommand> make_doctor_command() { return std::make_unique<DoctorCommand>(); }

}  // namespace distmoe::tools
