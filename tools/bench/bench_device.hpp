// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe bench` needs of the machine that computes: memory, a clock, and the ceilings that
// this machine has. One object a rank, used by its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "distmoe/config.hpp"
#include "distmoe/memory_plan.hpp"
#include "distmoe/tensor.hpp"
#include "rank_group.hpp"

namespace distmoe::tools {

/// Work that is timed again and again.
class Workload {
 public:
  virtual ~Workload() = default;
  /// Does it once, or hands it to the device.
  virtual void enqueue() = 0;
};

class FunctionWorkload final : public Workload {
 public:
  explicit FunctionWorkload(std::function<void()> body) : body_(std::move(body)) {}
  void enqueue() override { body_(); }

 private:
  std::function<void()> body_;
};

/// Work whose rate is a ceiling: floating-point operations, or bytes.
struct Ceiling {
  std::unique_ptr<Workload> workload;
  double work = 0.0;
};

/// Two dense products of the rows of a call, as balanced as can be: [rows, D] x [D, 2F] and
/// [rows, F] x [F, D] of each of some experts.
struct DenseLayer {
  std::int64_t num_rows = 0;  ///< of all experts
  std::int64_t num_experts = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  const void* w13 = nullptr;  ///< BF16 [experts, 2F, D], in this device's memory
  const void* w2 = nullptr;   ///< BF16 [experts, D, F]
};

/// In the order of a lap; kMiddle is set where it has two parts, the two after it where the second
/// one restores activations, kFirstStep and those after it where the steps of its calls are
/// watched.
enum class TimeMark : std::size_t { kBegin, kMiddle, kRestore, kRestored, kEnd, kFirstStep };
/// Before each step of a forward and of a backward, and at the end of each.
inline constexpr std::size_t kMaxStepMarks = 18;
inline constexpr std::size_t kNumTimeMarks =
    static_cast<std::size_t>(TimeMark::kFirstStep) + kMaxStepMarks;

constexpr TimeMark next_of(TimeMark mark) {
  return static_cast<TimeMark>(static_cast<std::size_t>(mark) + 1);
}
constexpr TimeMark step_mark(std::size_t index) {
  return static_cast<TimeMark>(static_cast<std::size_t>(TimeMark::kFirstStep) + index);
}

class BenchDevice {
 public:
  virtual ~BenchDevice() = default;

  virtual Device place() const = 0;
  /// For reports.
  virtual std::string name() const = 0;
  /// Equal for ranks that share a machine's rates.
  virtual std::uint64_t identity() const = 0;
  /// Of the last level that lies before memory.
  virtual std::int64_t cache_bytes() const = 0;

  /// Memory that lives as long as this object. Throws out_of_memory.
  virtual void* allocate(std::size_t bytes) = 0;
  /// Between host and device memory, either way, or inside one. Complete on return.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
  virtual void set_bytes(void* to, int value, std::size_t bytes) = 0;

  /// The stream of calls, null on the CPU.
  virtual void* stream() const = 0;
  /// Notes the time when everything that was handed to `on_stream` before is done.
  virtual void mark(TimeMark point, void* on_stream) = 0;
  /// Returns when the stream is idle.
  virtual void wait() = 0;
  /// Between the last marks of two points, in microseconds; after wait().
  virtual double elapsed_us(TimeMark from, TimeMark to) const = 0;
  /// Whether the device runs behind the host: then the lap before a timed one hides what it costs
  /// to hand work over, and lets the ranks meet.
  virtual bool is_asynchronous() const = 0;
  /// A graph of what `record` enqueues on the stream that it gets. Throws unsupported on the CPU.
  virtual std::unique_ptr<Workload> capture(const std::function<void(void* stream)>& record) = 0;

  /// Empty, with a reason in `why_not`, where this machine has no fast library.
  virtual std::optional<Ceiling> dense_product(std::string& why_not) = 0;
  virtual std::optional<Ceiling> dense_layer(const DenseLayer& layer, std::string& why_not) = 0;
  /// Of memory, whose ceilings share what they read and what they write. Of a copy: bytes read and
  /// bytes written, added.
  virtual Ceiling memory_copy() = 0;
  virtual Ceiling memory_read() = 0;
  virtual Ceiling memory_write() = 0;
  /// Collective, for workloads of `readers`, ranks of different devices in ascending order: each
  /// reads from another one's memory while its own is read. Empty on every rank, with a reason,
  /// where there is no such link.
  virtual std::optional<Ceiling> link_read(RankGroup& group, std::span<const int> readers,
                                           std::string& why_not) = 0;
};

std::unique_ptr<BenchDevice> make_cpu_bench_device();
/// Throws unsupported in a build without CUDA.
std::unique_ptr<BenchDevice> make_cuda_bench_device(int device);

}  // namespace distmoe::tools
