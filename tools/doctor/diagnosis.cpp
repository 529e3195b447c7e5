// SPDX-License-Identifier: Apache-2.0
#include "doctor/diagnosis.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"
#include "plan/byte_text.hpp"

namespace distmoe::tools {
namespace {

constexpr const char* kAdviseDriver =
    "To use GPUs, install NVIDIA's driver 580 or later (it serves CUDA 13); the CPU backend does "
    "without.";
constexpr const char* kAdviseToolkit =
    "To use the GPUs of this machine, build distmoe where the CUDA toolkit 13 (nvcc) is installed.";
constexpr const char* kAdviseHopper =
    "The CUDA kernels are made for Hopper (H100, H200, compute capability 9.0): use the CPU "
    "backend, or a machine that has one.";
constexpr const char* kAdviseNccl =
    "For a process a GPU, install NCCL 2.28 or later (libnccl2 of NVIDIA's repository, or "
    "nvidia-nccl-cu13 of PyPI) and let DISTMOE_NCCL_LIBRARY name it where the loader does not find "
    "it; --engine threads does without.";
constexpr const char* kAdviseMpi =
    "For --engine mpi, install Open MPI (Debian: openmpi-bin, libopenmpi3) and keep "
    "libdistmoe_mpi.so beside distmoe or in ../lib; --engine threads and tcp do without.";
constexpr const char* kAdviseMpiBuild =
    "For --engine mpi, build distmoe where libopenmpi-dev is installed; --engine threads and tcp "
    "do without.";
constexpr const char* kAdviseMpirun =
    "For --engine mpi, install the launcher (Debian: openmpi-bin); --engine threads and tcp do "
    "without.";
constexpr const char* kAdvisePinned =
    "Raise the limit of locked memory (ulimit -l) and see whether the container may pin memory.";

const Component& find(const std::vector<Component>& components, const char* name) {
  const auto found = std::ranges::find(components, name, &Component::name);
  DISTMOE_CHECK(found != components.end(), kInternal, "no component is called ", name);
  return *found;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string cuda_version(int number) {
  return concat("CUDA ", number / 1000, ".", number % 1000 / 10);
}

/// The host: processor, vector instructions, memory.
void examine_host(const DoctorFacts& facts, std::vector<Finding>& findings) {
  const Machine& machine = facts.machine;
  const auto has = [&](const char* feature) {
    return std::ranges::find(machine.simd, feature) != machine.simd.end();
  };
  findings.push_back({"cores", Verdict::kFine,
                      concat(machine.usable_cores, " of ", machine.cores, " usable",
                             machine.processor.empty() ? "" : ", ", machine.processor)});
  const bool is_bf16 = has("avx512_bf16") || has("amx_bf16") || has("bf16");
  const bool is_wide = is_bf16 || has("avx2") || has("asimd");
  findings.push_back({"vector instructions", is_wide ? Verdict::kFine : Verdict::kMissing,
                      concat(joined(machine.simd), is_bf16   ? ": BF16 products in hardware"
                                                   : is_wide ? ": products in FP32"
                                                             : "no AVX2: right, but slow")});
  findings.push_back({"matrix products", Verdict::kFine, find(facts.backends, "cpu").detail});
  findings.push_back({"memory", Verdict::kFine, human_bytes(machine.memory_bytes)});
}

Finding examine_driver(const GpuFacts& gpu) {
  const std::string module =
      gpu.kernel_module.empty() ? "" : concat("NVIDIA kernel module ", gpu.kernel_module);
  if (!gpu.is_compiled) {
    if (module.empty()) return {"driver", Verdict::kMissing, "no NVIDIA driver is loaded"};
    return {"driver", Verdict::kMissing, module + ", which this build without CUDA cannot use",
            kAdviseToolkit};
  }
  if (gpu.driver_cuda == 0) {
    if (module.empty()) {
      return {"driver", Verdict::kMissing, "no NVIDIA driver is loaded", kAdviseDriver};
    }
    return {"driver", Verdict::kBroken, module + ", but its library libcuda.so.1 cannot be loaded",
            kAdviseDriver};
  }
  const std::string serves =
      concat(module, module.empty() ? "serves " : ", serves ", cuda_version(gpu.driver_cuda));
  if (gpu.driver_cuda < gpu.runtime_cuda) {
    return {"driver", Verdict::kBroken,
            concat(serves, ", but this build needs ", cuda_version(gpu.runtime_cuda)),
            kAdviseDriver};
  }
  return {"driver", Verdict::kFine, serves};
}

std::string text_of(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}

void examine_devices(const DoctorFacts& facts, std::vector<Finding>& findings) {
  const GpuFacts& gpu = facts.gpu;
  for (std::size_t i = 0; i < gpu.gpus.size(); ++i) {
    const Gpu& device = gpu.gpus[i];
    const bool is_hopper = device.major == 9 && device.minor == 0;
    findings.push_back({concat("GPU ", i), is_hopper ? Verdict::kFine : Verdict::kBroken,
                        concat(device.name, ", compute capability ", device.major, ".",
                               device.minor, ", ", human_bytes(device.memory_bytes)),
                        is_hopper ? "" : kAdviseHopper});
    findings.push_back({concat("GPU ", i, " virtual memory"),
                        device.has_virtual_memory ? Verdict::kFine : Verdict::kMissing,
                        device.has_virtual_memory ? "virtual memory management works"
                                                  : "no virtual memory management"});
    if (gpu.gpus.size() < 2) continue;
    const bool has_all = device.peers.size() + 1 == gpu.gpus.size();
    findings.push_back({concat("GPU ", i, " peers"), has_all ? Verdict::kFine : Verdict::kBroken,
                        device.peers.empty()
                            ? "addresses no other GPU"
                            : concat("addresses the memory of GPU ", text_of(device.peers)),
                        has_all ? ""
                                : "Ranks need peer access between their GPUs (NVLink, or PCIe with "
                                  "ACS off): nvidia-smi topo -p2p r shows what is there."});
  }
  if (gpu.gpus.size() > 1) {
    findings.push_back(
        facts.link.gb_s ? Finding{"link", Verdict::kFine,
                                  concat(static_cast<int>(*facts.link.gb_s),
                                         " GB/s one way while the other way is as busy, measured")}
                        : Finding{"link", Verdict::kBroken, facts.link.why_not});
  }
}

void examine_gpus(const DoctorFacts& facts, std::vector<Finding>& findings) {
  const GpuFacts& gpu = facts.gpu;
  findings.push_back(examine_driver(gpu));
  if (gpu.gpus.empty()) {
    if (gpu.driver_cuda > 0) {
      findings.push_back({"GPU", Verdict::kMissing,
                          gpu.problem.empty() ? "no CUDA device is present" : gpu.problem,
                          "See what nvidia-smi lists, and whether CUDA_VISIBLE_DEVICES or the "
                          "container hides the GPUs."});
    }
    findings.push_back({"pinned memory", Verdict::kMissing, "not needed without a GPU"});
    return;
  }
  examine_devices(facts, findings);
  findings.push_back(
      gpu.pinned_problem.empty()
          ? Finding{"pinned memory", Verdict::kFine, "host memory can be pinned"}
          : Finding{"pinned memory", Verdict::kBroken, gpu.pinned_problem, kAdvisePinned});
}

Finding examine_nccl(const DoctorFacts& facts) {
  const Component& nccl = find(facts.engines, "nccl");
  if (nccl.runs_here) return {"NCCL", Verdict::kFine, nccl.detail};
  // What is there and of no use is worth a word even where nobody would use it.
  const bool is_found = nccl.detail.find(" is NCCL ") != std::string::npos ||
                        nccl.detail.find(" has no ") != std::string::npos ||
                        nccl.detail.find("DISTMOE_NCCL_LIBRARY names") != std::string::npos;
  const bool is_broken = nccl.is_compiled && is_found;
  return {"NCCL", is_broken ? Verdict::kBroken : Verdict::kMissing, nccl.detail,
          is_broken || facts.gpu.can_run() ? kAdviseNccl : ""};
}

Finding examine_mpi(const DoctorFacts& facts) {
  const Component& mpi = find(facts.engines, "mpi");
  if (!mpi.runs_here) {
    return {"MPI", Verdict::kMissing, mpi.detail, mpi.is_compiled ? kAdviseMpi : kAdviseMpiBuild};
  }
  if (facts.mpirun.empty()) {
    return {"MPI", Verdict::kMissing, "the engine loads, but there is no mpirun", kAdviseMpirun};
  }
  return {"MPI", Verdict::kFine, "the engine loads; " + facts.mpirun};
}

bool uses(const ExecutionPath& path, const std::string& name) {
  return name == to_string(path.backend) || name == to_string(path.engine);
}

}  // namespace

const char* to_string(Verdict verdict) noexcept {
  constexpr const char* kNames[] = {"fine", "missing", "broken"};
  return kNames[static_cast<int>(verdict)];
}

std::string ExecutionPath::name() const {
  return concat(to_string(backend), " over ", to_string(engine));
}

bool Diagnosis::is_sound() const {
  return std::ranges::all_of(
      paths, [](const ExecutionPath& path) { return path.runs() || !path.why_not.empty(); });
}

std::vector<std::string> Diagnosis::advice() const {
  std::vector<std::string> all;
  for (const Finding& finding : findings) {
    const bool is_said = std::ranges::find(all, finding.advice) != all.end();
    if (!finding.advice.empty() && !is_said) all.push_back(finding.advice);
  }
  return all;
}

std::string Diagnosis::unmet(const std::vector<std::string>& required) const {
  for (const std::string& name : required) {
    const auto runs = [&](const ExecutionPath& path) { return path.runs() && uses(path, name); };
    if (std::ranges::any_of(paths, runs)) continue;
    const auto path = std::ranges::find_if(
        paths, [&](const ExecutionPath& candidate) { return uses(candidate, name); });
    return concat(name, " does not run here: ", path->outcome());
  }
  return {};
}

std::vector<ExecutionPath> plan_paths(const DoctorFacts& facts) {
  const auto problem_of = [](const Component& component) {
    return component.runs_here ? std::string() : component.detail;
  };
  const std::string no_cuda = problem_of(find(facts.backends, "cuda"));
  std::string no_mpi = problem_of(find(facts.engines, "mpi"));
  if (no_mpi.empty() && facts.mpirun.empty()) no_mpi = "there is no mpirun";
  const std::string no_nccl = problem_of(find(facts.engines, "nccl"));
  const int num_gpus = std::clamp(static_cast<int>(facts.gpu.gpus.size()), 1, 8);
  return {{BackendKind::kCpu, Engine::kThreads, 2},
          {BackendKind::kCpu, Engine::kMpi, 2, no_mpi},
          {BackendKind::kCpu, Engine::kTcp, 2},
          {BackendKind::kCuda, Engine::kThreads, num_gpus, no_cuda},
          {BackendKind::kCuda, Engine::kNccl, num_gpus, no_cuda.empty() ? no_nccl : no_cuda}};
}

Diagnosis diagnose(const DoctorFacts& facts, std::vector<ExecutionPath> paths) {
  Diagnosis diagnosis;
  examine_host(facts, diagnosis.findings);
  examine_gpus(facts, diagnosis.findings);
  diagnosis.findings.push_back(examine_nccl(facts));
  diagnosis.findings.push_back(examine_mpi(facts));
  diagnosis.paths = std::move(paths);
  return diagnosis;
}

}  // namespace distmoe::tools
