// SPDX-License-Identifier: Apache-2.0
#include "core/environment.hpp"

#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/check.hpp"
#include "core/log.hpp"

namespace distmoe {
namespace {

constexpr std::array kVariables = {
    EnvironmentVariable{"DISTMOE_LOG_LEVEL", "debug | info | warning | error",
                        "lowest level that the default log sink writes to stderr"},
    EnvironmentVariable{"DISTMOE_NUM_THREADS", "1..1024",
                        "worker threads of a rank on the CPU, where the context does not say"},
    EnvironmentVariable{"DISTMOE_CPU_MATMUL", "bf16 | f32",
                        "forces the BF16 or the FP32 matrix products of the CPU backend"},
    EnvironmentVariable{"DISTMOE_NCCL_LIBRARY", "a file",
                        "the NCCL library that is loaded in place of libnccl.so.2"},
};

constexpr std::array kLauncherVariables = {
    EnvironmentVariable{"RANK", "0..WORLD_SIZE - 1", "this process among all (torchrun)"},
    EnvironmentVariable{"WORLD_SIZE", "1 or more", "processes in all (torchrun)"},
    EnvironmentVariable{"MASTER_ADDR", "a host", "where rank 0 runs (torchrun)"},
    EnvironmentVariable{"MASTER_PORT", "1..65534",
                        "torchrun's own port; rank 0 listens at the one above it"},
    EnvironmentVariable{"TORCHELASTIC_RUN_ID", "any text", "tells jobs apart (torchrun)"},
    EnvironmentVariable{"LOCAL_RANK", "0 or more",
                        "this process among those of its host, which chooses its GPU (torchrun)"},
    EnvironmentVariable{"OMPI_COMM_WORLD_LOCAL_RANK", "0 or more",
                        "the same under mpirun, where LOCAL_RANK is not set"},
    EnvironmentVariable{"NCCL_NVLS_ENABLE", "0 | 1 | 2",
                        "NVLink multicast of NCCL; 0 where it is not set"},
};

std::string text_of(const EnvironmentVariable& variable) {
  const char* value = std::getenv(variable.name);
  return value == nullptr ? std::string() : value;
}

Environment read_environment() {
  Environment result;
  const auto report_illegal = [&](const EnvironmentVariable& variable, const char* value) {
    result.complaints.push_back(
        concat(variable.name, '=', value, " ignored; legal: ", variable.legal));
  };
  if (const char* value = std::getenv(kVariables[0].name)) {
    static constexpr const char* kLevels[] = {"debug", "info", "warning", "error"};
    bool known = false;
    for (int level = 0; level < 4; ++level) {
      if (std::strcmp(value, kLevels[level]) != 0) continue;
      result.log_level = static_cast<LogLevel>(level);
      known = true;
    }
    if (!known) report_illegal(kVariables[0], value);
  }
  if (const char* value = std::getenv(kVariables[1].name)) {
    const char* end = value + std::strlen(value);
    int number = 0;
    const auto parsed = std::from_chars(value, end, number);
    if (parsed.ec == std::errc() && parsed.ptr == end && number >= 1 && number <= 1024) {
      result.num_threads = number;
    } else {
      report_illegal(kVariables[1], value);
    }
  }
  if (const char* value = std::getenv(kVariables[2].name)) {
    const std::string_view text = value;
    if (text == "bf16" || text == "f32") {
      result.cpu_matmul = text;
    } else {
      report_illegal(kVariables[2], value);
    }
  }
  result.nccl_library = text_of(kVariables[3]);
  return result;
}

}  // namespace

const Environment& unreported_environment() {
  static const Environment instance = read_environment();
  return instance;
}

const Environment& environment() {
  static std::atomic<bool> is_reported{false};
  const Environment& instance = unreported_environment();
  // NOTE: set before logging, because log() comes here first.
  if (!is_reported.exchange(true)) {
    for (const std::string& complaint : instance.complaints) log(LogLevel::kWarning, complaint);
  }
  return instance;
}

LauncherEnvironment launcher_environment() {
  LauncherEnvironment launcher;
  std::string* const texts[] = {&launcher.rank,        &launcher.world_size, &launcher.master_addr,
                                &launcher.master_port, &launcher.run_id,     &launcher.local_rank};
  for (std::size_t i = 0; i < std::size(texts); ++i) *texts[i] = text_of(kLauncherVariables[i]);
  if (launcher.local_rank.empty()) launcher.local_rank = text_of(kLauncherVariables[6]);
  return launcher;
}

void leave_nvlink_multicast_unused() { setenv(kLauncherVariables[7].name, "0", 0); }

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

std::span<const EnvironmentVariable> launcher_variables() { return kLauncherVariables; }

std::optional<std::string> environment_value(const EnvironmentVariable& variable) {
  const char* value = std::getenv(variable.name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

}  // namespace distmoe
