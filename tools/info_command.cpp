// SPDX-License-Identifier: Apache-2.0
//
// `distmoe info`: what this build has, what runs here and why not, and what can be set.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/environment.hpp"
#include "distmoe/version.hpp"
#include "installation.hpp"
#include "machine.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter =
    "Examples:\n"
    "  distmoe info\n"
    "  distmoe info --json\n";

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
    text += "  " + component.name + ": " + state + " (" + component.detail + ")\n";
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
