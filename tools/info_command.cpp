// SPDX-License-Identifier: Apache-2.0
//
// `distmoe info`: what this build has, what runs here and why not, and what can be set.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cuda/device.hpp"
#include "comm/mpi_engine.hpp"
#include "comm/nccl_engine.hpp"
#include "core/check.hpp"
#include "core/environment.hpp"
#include "distmoe/version.hpp"
#include "machine.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

#if defined(DISTMOE_WITH_MPI)
constexpr bool kIsMpiCompiled = true;
#else
constexpr bool kIsMpiCompiled = false;
#endif

constexpr const char* kFooter =
    "Examples:\n"
    "  distmoe info\n"
    "  distmoe info --json\n";

/// A backend or an engine.
struct Component {
  const char* name;
  bool is_compiled = false;
  bool runs_here = false;
  std::string detail;  ///< how it runs, or why it does not
};

std::vector<Component> backends() {
  const std::string problem = cuda::why_unavailable();
  return {{"cpu", true, true, cpu::describe_matmul()},
          {"cuda", cuda::kIsCompiled, problem.empty(),
           problem.empty() ? concat(cuda::device_count(), " device(s) of compute capability 9.0")
                           : problem}};
}

Component mpi_engine() {
  const std::string problem = mpi_engine_problem();
  if (!problem.empty()) return {"mpi", kIsMpiCompiled, false, problem};
  return {"mpi", kIsMpiCompiled, true, "ranks are processes that mpirun starts"};
}

/// Whether there are GPUs to use it with is what backends() say.
Component nccl_engine() {
  const std::string problem = nccl_engine_problem();
  if (!problem.empty()) return {"nccl", cuda::kIsCompiled, false, problem};
  return {"nccl", true, true, concat("ranks are processes with a GPU each, ", nccl_library_text())};
}

std::vector<Component> engines() {
  return {{"threads", true, true, "ranks are threads of one process"},
          mpi_engine(),
          {"tcp", true, true, "ranks are processes that torchrun starts"},
          nccl_engine()};
}

Json json_of(const std::vector<Component>& components) {
  Json list = Json::array();
  for (const Component& component : components) {
    list.push_back({{"name", component.name},
                    {"compiled", component.is_compiled},
                    {"runs", component.runs_here},
                    {"detail", component.detail}});
  }
  return list;
}

Json json_of(const Machine& machine) {
  return {{"processor", machine.processor},
          {"cores", machine.cores},
          {"usable_cores", machine.usable_cores},
          {"memory_bytes", machine.memory_bytes},
          {"simd", machine.simd}};
}

/// The library's own, then what launchers set.
std::vector<EnvironmentVariable> all_variables() {
  const auto own = environment_variables();
  const auto launcher = launcher_variables();
  std::vector<EnvironmentVariable> all(own.begin(), own.end());
  all.insert(all.end(), launcher.begin(), launcher.end());
  return all;
}

Json environment_json() {
  Json list = Json::array();
  for (const EnvironmentVariable& variable : all_variables()) {
    const std::optional<std::string> value = environment_value(variable);
    list.push_back({{"name", variable.name},
                    {"value", value ? Json(*value) : Json(nullptr)},
                    {"legal", variable.legal},
                    {"meaning", variable.meaning}});
  }
  return list;
}

std::string info_json() {
  // NOTE: looking for NCCL sets a variable.
  const Json environment = environment_json();
  const Json info = {{"version", version()},
                     {"backends", json_of(backends())},
                     {"engines", json_of(engines())},
                     {"machine", json_of(inspect_machine())},
                     {"environment", environment}};
  // NOTE: the environment need not be UTF-8.
  return info.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string text_of(const char* kind, const std::vector<Component>& components) {
  std::string text = std::string(kind) + "\n";
  for (const Component& component : components) {
    const char* state = component.runs_here     ? "runs here"
                        : component.is_compiled ? "does not run here"
                                                : "not compiled";
    text += std::string("  ") + component.name + ": " + state + " (" + component.detail + ")\n";
  }
  return text;
}

std::string text_of(const Machine& machine) {
  std::string text = "machine\n";
  if (!machine.processor.empty()) text += "  processor: " + machine.processor + '\n';
  text += "  cores: " + std::to_string(machine.cores) +
          ", usable by this process: " + std::to_string(machine.usable_cores) + '\n';
  text += "  memory: " + std::to_string(machine.memory_bytes >> 20) + " MiB\n  simd:";
  for (const std::string& feature : machine.simd) text += ' ' + feature;
  return text + '\n';
}

std::string environment_text() {
  std::string text = "environment variables\n";
  for (const EnvironmentVariable& variable : all_variables()) {
    const std::optional<std::string> value = environment_value(variable);
    text += std::string("  ") + variable.name + (value ? '=' + *value : " (not set)") + ": " +
            variable.meaning + "; legal: " + variable.legal + '\n';
  }
  return text;
}

std::string info_text() {
  const std::string environment = environment_text();
  return std::string("distmoe ") + version() + '\n' + text_of("backends", backends()) +
         text_of("engines", engines()) + text_of(inspect_machine()) + environment;
}

class InfoCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "info"; }
  const char* summary() const noexcept override {
    return "List backends, engines, this machine and environment variables";
  }
  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    app.add_flag("--json", json_, "Print one JSON object on stdout and nothing else");
  }
  ExitCode execute() override {
    write_stdout(json_ ? info_json() : info_text());
    return ExitCode::kSuccess;
  }

 private:
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_info_command() { return std::make_unique<InfoCommand>(); }

}  // namespace distmoe::tools
