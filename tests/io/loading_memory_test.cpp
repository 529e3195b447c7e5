// SPDX-License-Identifier: Apache-2.0
//
// Invariant: a rank reads no page but those of its own experts, and loading needs no anonymous
// memory beyond the weights in BF16 but a little.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/raw_safetensors.hpp"
#include "io/safetensors.hpp"
#include "io/temporary_directory.hpp"
#include "io/tiny_model.hpp"

namespace {

std::atomic<std::int64_t> g_live_bytes = 0;
std::atomic<std::int64_t> g_peak_bytes = 0;

void* count_allocation(void* block) {
  if (block == nullptr) return nullptr;
  const auto num_bytes = static_cast<std::int64_t>(::malloc_usable_size(block));
  const std::int64_t live = g_live_bytes += num_bytes;
  if (live > g_peak_bytes) g_peak_bytes = live;
  return block;
}

void count_release(void* block) {
  if (block == nullptr) return;
  g_live_bytes -= static_cast<std::int64_t>(::malloc_usable_size(block));
  std::free(block);
}

void* require(void* block) {
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

void* allocate_aligned(std::size_t size, std::align_val_t alignment) {
  const auto unit = static_cast<std::size_t>(alignment);
  return count_allocation(std::aligned_alloc(unit, (size + unit - 1) / unit * unit));
}

}  // namespace

// Every allocation of the program is counted.
void* operator new(std::size_t size) { return require(count_allocation(std::malloc(size))); }
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return require(allocate_aligned(size, alignment));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_aligned(size, alignment);
}
void operator delete(void* block) noexcept { count_release(block); }
void operator delete[](void* block) noexcept { count_release(block); }
void operator delete(void* block, std::size_t) noexcept { count_release(block); }
void operator delete[](void* block, std::size_t) noexcept { count_release(block); }
void operator delete(void* block, std::align_val_t) noexcept { count_release(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { count_release(block); }

namespace distmoe {
namespace {

using testing::OwnedTensor;
using testing::TemporaryDirectory;
using testing::TinyModel;

constexpr std::int64_t kMiB = 1 << 20;

constexpr TinyModel kModel{.num_experts = 8, .d = 512, .f = 512};

struct Format {
  const char* name;
  const char* architecture;
  std::vector<OwnedTensor> tensors;
};

std::vector<Format> formats() {
  return {{"per expert", "MixtralForCausalLM", kModel.per_expert(0, TinyModel::mixtral_name)},
          {"fused", "MixtralForCausalLM", kModel.fused(0)},
          {"FP8", "DeepseekV3ForCausalLM", kModel.fp8(0)},
          {"gpt-oss", "GptOssForCausalLM", kModel.gpt_oss(0)},
          {"MXFP4", "GptOssForCausalLM", kModel.mxfp4(0)}};
}

/// Where this process has mapped `file`; the caller has mapped it once.
std::byte* address_of_mapping(const std::filesystem::path& file) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with(file.string())) continue;
    void* address = nullptr;
    std::istringstream(line) >> address;
    return static_cast<std::byte*>(address);
  }
  throw std::runtime_error("no mapping of " + file.string());
}

/// Takes every page of the mapped file away but those with bytes of `expert`.
void leave_only(std::int64_t expert, const std::filesystem::path& file) {
  const std::string bytes = testing::read_file(file);
  const auto contents = parse_safetensors(testing::as_bytes(bytes), file.string());
  std::byte* mapping = address_of_mapping(file);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::string own_name = ".experts." + std::to_string(expert) + ".";
  ASSERT_EQ(::mprotect(mapping, bytes.size(), PROT_NONE), 0);
  for (const StoredTensor& tensor : contents.tensors) {
    const bool is_fused = tensor.shape[0] == kModel.num_experts;
    if (!is_fused && tensor.name.find(own_name) == std::string::npos) continue;
    const auto offset =
        static_cast<std::size_t>(tensor.data.data() - testing::as_bytes(bytes).data());
    const std::size_t slice = tensor.data.size() / (is_fused ? kModel.num_experts : 1);
    const std::size_t begin = offset + (is_fused ? static_cast<std::size_t>(expert) * slice : 0);
    const std::size_t first_page = begin / page * page;
    ASSERT_EQ(::mprotect(mapping + first_page, begin + slice - first_page, PROT_READ), 0);
  }
}

TEST(LoadingMemory, ReadsThePagesOfItsOwnExpertsOnly) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const TemporaryDirectory directory;
    kModel.write(directory, format.architecture, format.tensors);
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    leave_only(3, directory / "model.safetensors");
    const LoadedExperts experts = checkpoint.load_experts(0, 3, 1);
    const std::vector<BF16> w2 = kModel.w2(0, 3, 1);
    EXPECT_EQ(std::memcmp(experts.w2.data(), w2.data(), experts.w2.num_bytes()), 0);
    EXPECT_DEATH(checkpoint.load_experts(0, 5, 1), "") << "no page was taken away";
  }
}

TEST(LoadingMemory, NeedsTheWeightsInBf16AndLittleMore) {
  for (const Format& format : formats()) {
    const TemporaryDirectory directory;
    kModel.write(directory, format.architecture, format.tensors);
    const std::int64_t before = g_live_bytes;
    g_peak_bytes = before;
    const Checkpoint checkpoint = Checkpoint::open(directory.path());
    const LoadedExperts experts = checkpoint.load_experts(0, 0, kModel.num_experts);
    const auto weights =
        static_cast<std::int64_t>(experts.w13.num_bytes() + experts.w2.num_bytes());
    EXPECT_EQ(weights, 8 * 3 * kMiB / 2);
    EXPECT_GE(g_peak_bytes - before, weights) << "the allocations are not seen";
    EXPECT_LE(g_peak_bytes - before, weights + kMiB / 4) << format.name;
  }
}

}  // namespace
}  // namespace distmoe
