// SPDX-License-Identifier: Apache-2.0
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "distmoe/version.hpp"
#include "doctor/diagnosis.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVerdictWidth = 9;
constexpr int kSubjectWidth = 22;

Json or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json json_of(const GpuFacts& gpu, const LinkRate& link) {
  Json devices = Json::array();
  for (const Gpu& device : gpu.gpus) {
    devices.push_back(
        {{"name", device.name},
         {"compute_capability", std::to_string(device.major) + "." + std::to_string(device.minor)},
         {"memory_bytes", device.memory_bytes},
         {"virtual_memory_management", device.has_virtual_memory},
         {"peers", device.peers}});
  }
  return {{"compiled", gpu.is_compiled},
          {"kernel_module", or_null(gpu.kernel_module)},
          {"driver_cuda", gpu.driver_cuda},
          {"runtime_cuda", gpu.runtime_cuda},
          {"devices", devices},
          {"link_gb_s", link.gb_s ? Json(*link.gb_s) : Json(nullptr)}};
}

Json json_of(const ExecutionPath& path) {
  return {{"backend", to_string(path.backend)},
          {"engine", to_string(path.engine)},
          {"ranks", path.num_ranks},
          {"runs", path.runs()},
          {"tried", path.check.has_value()},
          {"detail", path.outcome()},
          {"seconds", path.check ? Json(path.check->seconds) : Json(nullptr)}};
}

}  // namespace

std::string json_of(const DoctorFacts& facts, const Diagnosis& diagnosis) {
  Json findings = Json::array();
  for (const Finding& finding : diagnosis.findings) {
    findings.push_back({{"subject", finding.subject},
                        {"verdict", to_string(finding.verdict)},
                        {"detail", finding.detail},
                        {"advice", or_null(finding.advice)}});
  }
  Json paths = Json::array();
  for (const ExecutionPath& path : diagnosis.paths) paths.push_back(json_of(path));
  const Json all = {{"version", version()},
                    {"sound", diagnosis.is_sound()},
                    {"machine", json_of(facts.machine)},
                    {"gpu", json_of(facts.gpu, facts.link)},
                    {"findings", findings},
                    {"paths", paths},
                    {"advice", diagnosis.advice()}};
  // NOTE: a path in a loader's message need not be UTF-8.
  return all.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
}

std::string text_of(const Diagnosis& diagnosis) {
  std::ostringstream text;
  text << "distmoe " << version() << "\n\nfound\n" << std::left;
  for (const Finding& finding : diagnosis.findings) {
    text << "  " << std::setw(kVerdictWidth) << to_string(finding.verdict)
         << std::setw(kSubjectWidth) << finding.subject << finding.detail << '\n';
  }
  text << "\nwill run\n";
  for (const ExecutionPath& path : diagnosis.paths) {
    if (!path.check || !path.check->is_right) continue;
    text << "  " << std::setw(kVerdictWidth + kSubjectWidth) << path.name() << path.check->words
         << " (" << std::fixed << std::setprecision(1) << path.check->seconds << " s)\n";
  }
  text << "\nwill not run\n";
  bool is_any = false;
  for (const ExecutionPath& path : diagnosis.paths) {
    if (path.runs()) continue;
    is_any = true;
    text << "  " << std::setw(kVerdictWidth + kSubjectWidth) << path.name()
         << (path.check ? "FAILED: " : "") << path.outcome() << '\n';
  }
  if (!is_any) text << "  nothing: every backend runs over every engine\n";
  const std::vector<std::string> advice = diagnosis.advice();
  if (!advice.empty()) text << "\nto do\n";
  for (const std::string& line : advice) text << "  - " << line << '\n';
  return text.str();
}

}  // namespace distmoe::tools
