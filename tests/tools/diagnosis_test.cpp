// SPDX-License-Identifier: Apache-2.0
// Invariant: from the facts of a machine follow what is tried, a verdict on each part, and advice
// where something would help; only a check that failed or an unmet requirement is unsound.
#include "doctor/diagnosis.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace distmoe::tools {
namespace {

/// Two cores, no GPU, MPI; a build with CUDA.
DoctorFacts cpu_machine() {
  DoctorFacts facts;
  facts.machine = {"Processor", 4, 2, std::int64_t{8} << 30, {"avx2", "avx512_bf16"}};
  facts.backends = {{"cpu", true, true, "oneDNN"}, {"cuda", true, false, "no CUDA device"}};
  facts.engines = {{"threads", true, true, ""},
                   {"mpi", true, true, ""},
                   {"tcp", true, true, ""},
                   {"nccl", true, false, "NCCL cannot be loaded: libnccl.so.2"}};
  facts.gpu = {.is_compiled = true, .runtime_cuda = 13000, .problem = "no CUDA device"};
  facts.mpirun = "mpirun (Open MPI) 4.1.4";
  return facts;
}

Gpu hopper(std::vector<int> peers) {
  return {"NVIDIA H200", 9, 0, std::int64_t{141} << 30, true, std::move(peers)};
}

/// Two H200 with NCCL.
DoctorFacts gpu_machine() {
  DoctorFacts facts = cpu_machine();
  facts.backends[1] = {"cuda", true, true, "2 devices"};
  facts.engines[3] = {"nccl", true, true, "NCCL 2.28.9"};
  facts.gpu = {.is_compiled = true,
               .kernel_module = "580.159.04",
               .driver_cuda = 13000,
               .runtime_cuda = 13000,
               .gpus = {hopper({1}), hopper({0})}};
  facts.link.gb_s = 337.0;
  return facts;
}

Finding find(const Diagnosis& diagnosis, const std::string& subject) {
  const auto found = std::ranges::find(diagnosis.findings, subject, &Finding::subject);
  EXPECT_NE(found, diagnosis.findings.end()) << subject;
  return found == diagnosis.findings.end() ? Finding{} : *found;
}

Diagnosis diagnose_untried(const DoctorFacts& facts) { return diagnose(facts, plan_paths(facts)); }

/// Every path that can be tried is, with `is_right`.
Diagnosis diagnose_tried(const DoctorFacts& facts, bool is_right) {
  auto paths = plan_paths(facts);
  for (ExecutionPath& path : paths) {
    if (path.why_not.empty()) path.check = CheckResult{is_right, "said something", 0.5};
  }
  return diagnose(facts, std::move(paths));
}

std::string all_advice(const Diagnosis& diagnosis) {
  std::string text;
  for (const std::string& line : diagnosis.advice()) text += line + '\n';
  return text;
}

TEST(Diagnosis, WithoutAGpuTheCpuRunsAndADriverIsAdvised) {
  const Diagnosis diagnosis = diagnose_tried(cpu_machine(), true);
  EXPECT_TRUE(diagnosis.is_sound());
  EXPECT_EQ(find(diagnosis, "driver").verdict, Verdict::kMissing);
  EXPECT_EQ(find(diagnosis, "vector instructions").verdict, Verdict::kFine);
  EXPECT_EQ(find(diagnosis, "NCCL").verdict, Verdict::kMissing);
  EXPECT_NE(all_advice(diagnosis).find("driver 580"), std::string::npos);
  // NCCL is of no use without a GPU.
  EXPECT_EQ(all_advice(diagnosis).find("NCCL"), std::string::npos);
  EXPECT_EQ(diagnosis.unmet({"cpu", "mpi", "tcp"}), "");
  EXPECT_EQ(diagnosis.unmet({"cpu", "cuda"}), "cuda does not run here: no CUDA device");
}

TEST(Diagnosis, AGpuThatABuildCannotUseAsksForTheToolkit) {
  DoctorFacts facts = cpu_machine();
  facts.gpu = {.is_compiled = false, .kernel_module = "580.1", .problem = "no CUDA backend"};
  const Diagnosis diagnosis = diagnose_untried(facts);
  EXPECT_NE(find(diagnosis, "driver").detail.find("580.1"), std::string::npos);
  EXPECT_NE(all_advice(diagnosis).find("nvcc"), std::string::npos);
}

TEST(Diagnosis, ADriverThatIsTooOldSaysBothVersions) {
  DoctorFacts facts = cpu_machine();
  facts.gpu.driver_cuda = 12040;
  const Finding driver = find(diagnose_untried(facts), "driver");
  EXPECT_EQ(driver.verdict, Verdict::kBroken);
  EXPECT_NE(driver.detail.find("CUDA 12.4"), std::string::npos) << driver.detail;
  EXPECT_NE(driver.detail.find("CUDA 13.0"), std::string::npos) << driver.detail;
  EXPECT_NE(driver.advice.find("580"), std::string::npos);
}

TEST(Diagnosis, AnotherArchitectureIsNamed) {
  DoctorFacts facts = gpu_machine();
  facts.backends[1] = {"cuda", true, false, "device 0 has 8.x"};
  facts.gpu.problem = "device 0 has 8.x";
  facts.gpu.gpus = {{"NVIDIA A100", 8, 0, std::int64_t{80} << 30, true, {}}};
  const Diagnosis diagnosis = diagnose_tried(facts, true);
  EXPECT_EQ(find(diagnosis, "GPU 0").verdict, Verdict::kBroken);
  EXPECT_NE(find(diagnosis, "GPU 0").detail.find("NVIDIA A100, compute capability 8.0"),
            std::string::npos);
  EXPECT_NE(all_advice(diagnosis).find("Hopper"), std::string::npos);
  EXPECT_TRUE(diagnosis.is_sound());
}

TEST(Diagnosis, TwoGpusAreCheckedOverBothEngines) {
  const Diagnosis diagnosis = diagnose_tried(gpu_machine(), true);
  EXPECT_EQ(diagnosis.unmet({"cpu", "cuda", "threads", "mpi", "tcp", "nccl"}), "");
  EXPECT_EQ(diagnosis.paths.back().num_ranks, 2);
  EXPECT_NE(find(diagnosis, "link").detail.find("337 GB/s"), std::string::npos);
  EXPECT_EQ(find(diagnosis, "pinned memory").verdict, Verdict::kFine);
  EXPECT_TRUE(diagnosis.advice().empty()) << all_advice(diagnosis);
}

TEST(Diagnosis, GpusWithoutPeerAccessAndMemoryThatCannotBePinnedAreBroken) {
  DoctorFacts facts = gpu_machine();
  facts.gpu.gpus = {hopper({}), hopper({})};
  facts.gpu.gpus[1].has_virtual_memory = false;
  facts.gpu.pinned_problem = "out of memory";
  facts.link = {{}, "a rank cannot address the memory of another one's device"};
  const Diagnosis diagnosis = diagnose_untried(facts);
  EXPECT_EQ(find(diagnosis, "GPU 0 peers").verdict, Verdict::kBroken);
  EXPECT_EQ(find(diagnosis, "GPU 0 virtual memory").verdict, Verdict::kFine);
  EXPECT_EQ(find(diagnosis, "GPU 1 virtual memory").verdict, Verdict::kMissing);
  EXPECT_EQ(find(diagnosis, "link").verdict, Verdict::kBroken);
  EXPECT_EQ(find(diagnosis, "pinned memory").detail, "out of memory");
  EXPECT_NE(all_advice(diagnosis).find("nvidia-smi topo"), std::string::npos);
}

TEST(Diagnosis, AnNcclThatIsTooOldIsBrokenAlsoWithoutAGpu) {
  DoctorFacts facts = cpu_machine();
  facts.engines[3].detail = "/lib/libnccl.so.2 is NCCL 2.18.5; 2.28.0 or later is needed";
  const Diagnosis diagnosis = diagnose_untried(facts);
  EXPECT_EQ(find(diagnosis, "NCCL").verdict, Verdict::kBroken);
  EXPECT_NE(find(diagnosis, "NCCL").detail.find("2.18.5"), std::string::npos);
  EXPECT_NE(all_advice(diagnosis).find("NCCL 2.28 or later"), std::string::npos);
  // A path of the user's own that leads nowhere is worth a word too.
  facts.engines[3].detail = "NCCL cannot be loaded: DISTMOE_NCCL_LIBRARY names \"/none\"";
  EXPECT_EQ(find(diagnose_untried(facts), "NCCL").verdict, Verdict::kBroken);
}

TEST(Diagnosis, MpiNeedsItsEngineAndItsLauncher) {
  DoctorFacts facts = cpu_machine();
  facts.mpirun = "";
  const Diagnosis no_launcher = diagnose_untried(facts);
  EXPECT_NE(find(no_launcher, "MPI").detail.find("no mpirun"), std::string::npos);
  EXPECT_EQ(no_launcher.unmet({"mpi"}), "mpi does not run here: there is no mpirun");
  facts.engines[1] = {"mpi", true, false, "libmpi.so.40: cannot open"};
  EXPECT_NE(all_advice(diagnose_untried(facts)).find("libopenmpi3"), std::string::npos);
  facts.engines[1].is_compiled = false;
  EXPECT_NE(all_advice(diagnose_untried(facts)).find("libopenmpi-dev"), std::string::npos);
}

TEST(Diagnosis, ACheckThatFailedIsUnsound) {
  const DoctorFacts facts = cpu_machine();
  const Diagnosis diagnosis = diagnose_tried(facts, false);
  EXPECT_FALSE(diagnosis.is_sound());
  EXPECT_EQ(diagnosis.unmet({"tcp"}), "tcp does not run here: said something");
  EXPECT_NE(text_of(diagnosis).find("FAILED: said something"), std::string::npos);
}

TEST(KernelModuleVersion, IsTheFirstVersionOfTheFirstLine) {
  EXPECT_EQ(kernel_module_version(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n"
                "GCC version:  gcc version 12.2.0\n"),
            "580.159.04");
  EXPECT_EQ(kernel_module_version(""), "");
  EXPECT_EQ(kernel_module_version("no version\n1.2\n"), "");
}

}  // namespace
}  // namespace distmoe::tools
