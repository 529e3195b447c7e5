// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "backend/cpu/matmul.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "bench/bench_device.hpp"
#include "bench/onednn_product.hpp"
#include "bench/random_values.hpp"
#include "bench/read_streams.hpp"
#include "core/check.hpp"
#include "io/tensor_storage.hpp"
#include "machine.hpp"
#include "runtime/cores.hpp"

namespace distmoe::tools {
namespace {

using Clock = std::chrono::steady_clock;

/// Where the system does not say: more than most processors have.
constexpr std::int64_t kAssumedCacheBytes = std::int64_t{64} << 20;
constexpr std::int64_t kLeastStreamBytes = std::int64_t{64} << 20;
constexpr std::size_t kNoiseBytes = std::size_t{1} << 20;
/// Of one thread in the large product.
constexpr ProductShape kDenseShape{1024, 1536, 2048};

class CpuBenchDevice final : public BenchDevice {
 public:
  Device place() const override { return {}; }
  std::string name() const override {
    const Machine machine = inspect_machine();
    return concat(machine.processor.empty() ? "CPU" : machine.processor, ", ", cores_.num_cores,
                  " cores, ", cpu::describe_matmul());
  }
  std::uint64_t identity() const override { return cores_.fingerprint; }
  std::int64_t cache_bytes() const override {
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? bytes : kAssumedCacheBytes;
  }

  void* allocate(std::size_t bytes) override {
    return storage_.emplace_back(bytes, "the benchmark").data();
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void set_bytes(void* to, int value, std::size_t bytes) override {
    if (bytes > 0) std::memset(to, value, bytes);
  }

  void* stream() const override { return nullptr; }
  void mark(TimeMark point, void* /*on_stream*/) override {
    marks_[static_cast<std::size_t>(point)] = Clock::now();
  }
  void wait() override {}
  double elapsed_us(TimeMark from, TimeMark to) const override {
    return std::chrono::duration<double, std::micro>(marks_[static_cast<std::size_t>(to)] -
                                                     marks_[static_cast<std::size_t>(from)])
        .count();
  }
  bool is_asynchronous() const override { return false; }
  std::unique_ptr<Workload> capture(const std::function<void(void*)>& /*record*/) override {
    throw_error(ErrorCode::kUnsupported, "the CPU has no CUDA graphs");
  }

  std::optional<Ceiling> dense_product(std::string& /*why_not*/) override {
    ProductShape shape = kDenseShape;
    shape.m *= cores_.num_cores;
    return ceiling_of({shape});
  }
  std::optional<Ceiling> dense_layer(const DenseLayer& layer, std::string& /*why_not*/) override {
    return ceiling_of({{layer.num_rows, 2 * layer.intermediate_dim, layer.hidden_dim},
                       {layer.num_rows, layer.hidden_dim, layer.intermediate_dim}});
  }
  Ceiling memory_copy() override;
  Ceiling memory_read() override;
  Ceiling memory_write() override;
  std::optional<Ceiling> link_read(RankGroup& /*group*/, std::span<const int> /*readers*/,
                                   std::string& why_not) override {
    why_not = "the link: ranks on the CPU exchange bytes through their engine";
    return std::nullopt;
  }

 private:
  Ceiling ceiling_of(const std::vector<ProductShape>& shapes);
  cpu::ThreadPool& pool() {
    if (!pool_) pool_ = std::make_unique<cpu::ThreadPool>(cores_.num_cores);
    return *pool_;
  }
  std::size_t stream_bytes() const {
    return static_cast<std::size_t>(std::max(2 * cache_bytes(), kLeastStreamBytes));
  }
  /// Random bytes that fit no cache, the same for all who read them.
  const std::byte* stream_source() {
    if (stream_source_ == nullptr) {
      stream_source_ = static_cast<std::byte*>(allocate(stream_bytes()));
      fill_random(std::span(reinterpret_cast<BF16*>(stream_source_), kNoiseBytes / sizeof(BF16)),
                  4);
      for (std::size_t done = kNoiseBytes; done < stream_bytes(); done += kNoiseBytes) {
        std::memcpy(stream_source_ + done, stream_source_,
                    std::min(kNoiseBytes, stream_bytes() - done));
      }
    }
    return stream_source_;
  }
  std::byte* stream_target() {
    if (stream_target_ == nullptr) {
      stream_target_ = static_cast<std::byte*>(allocate(stream_bytes()));
    }
    return stream_target_;
  }
  Ceiling over_shares(std::function<void(std::size_t begin, std::size_t count)> body,
                      double bytes_moved_per_byte);

  CoreShare cores_ = cores_of_this_process();
  std::vector<TensorStorage> storage_;
  std::byte* stream_source_ = nullptr;
  std::byte* stream_target_ = nullptr;
  std::array<Clock::time_point, kNumTimeMarks> marks_{};
  std::unique_ptr<cpu::ThreadPool> pool_;  ///< for ceilings: all cores
};

Ceiling CpuBenchDevice::ceiling_of(const std::vector<ProductShape>& shapes) {
  const ProductType type =
      OneDnnProduct::is_supported(ProductType::kBF16) ? ProductType::kBF16 : ProductType::kF32;
  const int num_parts = cores_.num_cores;
  std::vector<std::shared_ptr<OneDnnProduct>> products;
  double flops = 0.0;
  for (const ProductShape& shape : shapes) {
    products.push_back(
        std::make_shared<OneDnnProduct>(shape, num_parts, type, ProductWeights::kPacked));
    flops += shape.flops();
  }
  auto body = [this, products, num_parts] {
    pool().run(num_parts, [&](std::int64_t part, int) {
      for (const auto& product : products) product->run(static_cast<int>(part));
    });
  };
  return {std::make_unique<FunctionWorkload>(std::move(body)), flops};
}

Ceiling CpuBenchDevice::over_shares(std::function<void(std::size_t, std::size_t)> body,
                                    double bytes_moved_per_byte) {
  const std::size_t share = stream_bytes() / static_cast<std::size_t>(cores_.num_cores);
  auto all = [this, share, body = std::move(body)] {
    pool().run(cores_.num_cores, [&](std::int64_t part, int) {
      body(share * static_cast<std::size_t>(part), share);
    });
  };
  const double bytes = static_cast<double>(share) * cores_.num_cores;
  return {std::make_unique<FunctionWorkload>(std::move(all)), bytes_moved_per_byte * bytes};
}

Ceiling CpuBenchDevice::memory_copy() {
  const std::byte* from = stream_source();
  std::byte* to = stream_target();
  return over_shares(
      [from, to](std::size_t begin, std::size_t count) {
        std::memcpy(to + begin, from + begin, count);
      },
      2.0);
}

Ceiling CpuBenchDevice::memory_read() {
  const std::byte* data = stream_source();
  return over_shares(
      [data](std::size_t begin, std::size_t count) {
        volatile std::uint64_t folded = read_streams(data + begin, count);
        static_cast<void>(folded);
      },
      1.0);
}

Ceiling CpuBenchDevice::memory_write() {
  std::byte* to = stream_target();
  return over_shares(
      [to](std::size_t begin, std::size_t count) { std::memset(to + begin, 0x5A, count); }, 1.0);
}

}  // namespace

std::unique_ptr<BenchDevice> make_cpu_bench_device() { return std::make_unique<CpuBenchDevice>(); }

}  // namespace distmoe::tools
