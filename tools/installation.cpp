// SPDX-License-Identifier: Apache-2.0
#include "installation.hpp"

#include "backend/backend.hpp"
#include "backend/cpu/matmul.hpp"
#include "backend/cuda/device.hpp"
#include "comm/mpi_engine.hpp"
#include "comm/nccl_engine.hpp"
#include "core/check.hpp"

namespace distmoe::tools {
namespace {

#if defined(DISTMOE_WITH_MPI)
constexpr bool kIsMpiCompiled = true;
#else
constexpr bool kIsMpiCompiled = false;
#endif

Component mpi_engine() {
  const std::string problem = mpi_engine_problem();
  if (!problem.empty()) return {"mpi", kIsMpiCompiled, false, problem};
  return {"mpi", kIsMpiCompiled, true, "ranks are processes that mpirun starts"};
}

Component nccl_engine() {
  const std::string problem = nccl_engine_problem();
  if (!problem.empty()) return {"nccl", cuda::kIsCompiled, false, problem};
  return {"nccl", true, true, concat("ranks are processes with a GPU each, ", nccl_library_text())};
}

}  // namespace

std::vector<Component> backends() {
  const std::string problem = cuda::why_unavailable();
  return {{"cpu", true, true, cpu::describe_matmul()},
          {"cuda", cuda::kIsCompiled, problem.empty(),
           problem.empty() ? concat(cuda::device_count(), " device(s) of compute capability 9.0")
                           : problem}};
}

std::vector<Component> engines() {
  return {{"threads", true, true, "ranks are threads of one process"},
          mpi_engine(),
          {"tcp", true, true, "ranks are processes that torchrun starts"},
          nccl_engine()};
}

nlohmann::ordered_json json_of(const std::vector<Component>& components) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Component& component : components) {
    list.push_back({{"name", component.name},
                    {"compiled", component.is_compiled},
                    {"runs", component.runs_here},
                    {"detail", component.detail}});
  }
  return list;
}

nlohmann::ordered_json json_of(const Machine& machine) {
  return {{"processor", machine.processor},
          {"cores", machine.cores},
          {"usable_cores", machine.usable_cores},
          {"memory_bytes", machine.memory_bytes},
          {"simd", machine.simd}};
}

}  // namespace distmoe::tools
