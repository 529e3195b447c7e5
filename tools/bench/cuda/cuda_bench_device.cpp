// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device.hpp"
#include "bench/bench_device.hpp"
#include "bench/cuda/cublas.hpp"
#include "bench/cuda/rate_kernels.hpp"
#include "bench/noise.hpp"
#include "core/check.hpp"

namespace distmoe::tools {
namespace {

/// A launch and the end of its blocks are less than a hundredth of what reading this takes: with
/// 1 GiB calls that read 6 GB seemed to read up to 3 percent faster than memory can.
constexpr std::size_t kMostStreamBytes = std::size_t{4} << 30;
constexpr std::size_t kStreamShareOfMemory = 32;
constexpr std::size_t kLinkBytes = std::size_t{512} << 20;
constexpr int kDenseSize = 8192;
constexpr std::uint64_t kNoiseSeed = 4;

std::size_t bf16_bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * sizeof(BF16);
}

class GraphWorkload final : public Workload {
 public:
  GraphWorkload(int device, const std::function<void(void*)>& record, void* stream)
      : graph_(device, record), stream_(stream) {}
  void enqueue() override { graph_.launch(stream_); }

 private:
  cuda::DeviceGraph graph_;
  void* stream_;
};

/// What a rank tells the others of its memory.
struct LinkRecord {
  const void* base = nullptr;
  std::int64_t process = 0;
  std::int64_t device = 0;
};

class CudaBenchDevice final : public BenchDevice {
 public:
  explicit CudaBenchDevice(int device);
  ~CudaBenchDevice() override;
  CudaBenchDevice(const CudaBenchDevice&) = delete;
  CudaBenchDevice& operator=(const CudaBenchDevice&) = delete;

  Device place() const override { return {DeviceType::kCuda, device_}; }
  std::string name() const override;
  std::uint64_t identity() const override;
  std::int64_t cache_bytes() const override;

  void* allocate(std::size_t bytes) override {
    return buffers_.emplace_back(bytes, device_).data();
  }
  void copy(void* to, const void* from, std::size_t bytes) override;
  void set_bytes(void* to, int value, std::size_t bytes) override;

  void* stream() const override { return stream_; }
  void mark(TimeMark point, void* on_stream) override;
  void wait() override { DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
  double elapsed_us(TimeMark from, TimeMark to) const override;
  bool is_asynchronous() const override { return true; }
  std::unique_ptr<Workload> capture(const std::function<void(void*)>& record) override {
    return std::make_unique<GraphWorkload>(device_, record, stream_);
  }

  std::optional<Ceiling> dense_product(std::string& why_not) override;
  std::optional<Ceiling> dense_layer(const DenseLayer& layer, std::string& why_not) override;
  Ceiling memory_copy() override;
  Ceiling memory_read() override;
  Ceiling memory_write() override;
  std::optional<Ceiling> link_read(RankGroup& group, std::span<const int> readers,
                                   std::string& why_not) override;

 private:
  /// Grows `buffer` and fills it with noise.
  void reserve(cuda::DeviceBuffer& buffer, std::size_t bytes);
  void fill(void* to, std::size_t bytes);
  /// What ceilings of memory read, noise, and what they write.
  std::size_t stream_bytes() const;
  void* stream_source();
  void* stream_target();
  bool can_address(std::int64_t peer_device) const;
  const Cublas& cublas() {
    if (!cublas_) cublas_ = std::make_unique<Cublas>();
    return *cublas_;
  }

  int device_;
  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kNumTimeMarks> events_{};
  std::deque<cuda::DeviceBuffer> buffers_;
  std::unique_ptr<Cublas> cublas_;
  std::shared_ptr<Communicator> communicator_;  ///< of link_, where that is symmetric memory
  void* link_ = nullptr;
  void* stream_source_ = nullptr;
  void* stream_target_ = nullptr;
  cuda::DeviceBuffer noise_;
  // Operands and results of the dense products, which use them one after the other.
  cuda::DeviceBuffer left_;
  cuda::DeviceBuffer right_;
  cuda::DeviceBuffer result_;
};

CudaBenchDevice::CudaBenchDevice(int device) : device_(device) {
  const std::string reason = cuda::why_unavailable();
  DISTMOE_CHECK(reason.empty(), kUnsupported, "CUDA is not available: ", reason);
  DISTMOE_CUDA_CHECK(cudaSetDevice(device));
  DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (cudaEvent_t& event : events_) DISTMOE_CUDA_CHECK(cudaEventCreate(&event));
}

CudaBenchDevice::~CudaBenchDevice() {
  if (communicator_ != nullptr) communicator_->symmetric_memory()->free(link_);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  cudaStreamDestroy(stream_);
}

std::string CudaBenchDevice::name() const {
  cudaDeviceProp properties{};
  DISTMOE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device_));
  int driver = 0;
  DISTMOE_CUDA_CHECK(cudaDriverGetVersion(&driver));
  int kilohertz = 0;
  DISTMOE_CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device_));
  return concat(properties.name, ", up to ", kilohertz / 1000, " MHz, driver for CUDA ",
                driver / 1000, ".", driver % 1000 / 10);
}

std::uint64_t CudaBenchDevice::identity() const {
  std::array<char, 32> bus{};
  DISTMOE_CUDA_CHECK(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device_));
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return std::hash<std::string>()(concat(host.data(), " ", bus.data()));
}

std::int64_t CudaBenchDevice::cache_bytes() const {
  int bytes = 0;
  DISTMOE_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device_));
  return bytes;
}

void CudaBenchDevice::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  DISTMOE_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  // NOTE: from pageable memory it returns once the bytes are staged, inside a device at once.
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

void CudaBenchDevice::set_bytes(void* to, int value, std::size_t bytes) {
  DISTMOE_CUDA_CHECK(cudaMemset(to, value, bytes));
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

void CudaBenchDevice::mark(TimeMark point, void* on_stream) {
  const cudaEvent_t event = events_[static_cast<std::size_t>(point)];
  const auto stream = static_cast<cudaStream_t>(on_stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  DISTMOE_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  const unsigned flags =
      capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
  DISTMOE_CUDA_CHECK(cudaEventRecordWithFlags(event, stream, flags));
}

double CudaBenchDevice::elapsed_us(TimeMark from, TimeMark to) const {
  float milliseconds = 0.0f;
  DISTMOE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events_[static_cast<std::size_t>(from)],
                                          events_[static_cast<std::size_t>(to)]));
  return 1e3 * static_cast<double>(milliseconds);
}

void CudaBenchDevice::fill(void* to, std::size_t bytes) {
  if (noise_.size() == 0) {
    const Noise noise(kNoiseSeed, 1.0);
    noise_ = cuda::DeviceBuffer(noise.period().size_bytes(), device_);
    noise_.upload(noise.period().data(), noise.period().size_bytes());
  }
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t count = std::min(bytes - done, noise_.size());
    copy(static_cast<std::byte*>(to) + done, noise_.data(), count);
    done += count;
  }
}

void CudaBenchDevice::reserve(cuda::DeviceBuffer& buffer, std::size_t bytes) {
  if (buffer.size() >= bytes) return;
  buffer = cuda::DeviceBuffer();
  buffer = cuda::DeviceBuffer(bytes, device_);
  fill(buffer.data(), bytes);
}

std::optional<Ceiling> CudaBenchDevice::dense_product(std::string& why_not) {
  if (why_not = cublas().problem(); !why_not.empty()) return std::nullopt;
  for (cuda::DeviceBuffer* operand : {&left_, &right_, &result_}) {
    reserve(*operand, bf16_bytes(kDenseSize, kDenseSize));
  }
  auto body = [this] {
    cublas().run({kDenseSize, kDenseSize, kDenseSize}, left_.data(), right_.data(), result_.data(),
                 stream_);
  };
  constexpr double kSize = kDenseSize;
  return Ceiling{std::make_unique<FunctionWorkload>(std::move(body)), 2.0 * kSize * kSize * kSize};
}

std::optional<Ceiling> CudaBenchDevice::dense_layer(const DenseLayer& layer, std::string& why_not) {
  if (why_not = cublas().problem(); !why_not.empty()) return std::nullopt;
  const std::int64_t batches = std::min(layer.num_experts, layer.num_rows);
  if (batches == 0) {
    why_not = "this rank owns no expert";
    return std::nullopt;
  }
  const std::int64_t rows_per_batch = layer.num_rows / batches;
  const std::int64_t rows = rows_per_batch * batches;
  reserve(right_, bf16_bytes(rows, std::max(layer.hidden_dim, layer.intermediate_dim)));
  reserve(result_, bf16_bytes(rows, std::max(layer.hidden_dim, 2 * layer.intermediate_dim)));
  const auto product = [&](std::int64_t m, std::int64_t k) {
    return BatchedProduct{static_cast<int>(m), static_cast<int>(rows_per_batch),
                          static_cast<int>(k), static_cast<int>(batches)};
  };
  const BatchedProduct w13 = product(2 * layer.intermediate_dim, layer.hidden_dim);
  const BatchedProduct w2 = product(layer.hidden_dim, layer.intermediate_dim);
  auto body = [this, w13, w2, layer] {
    cublas().run(w13, layer.w13, right_.data(), result_.data(), stream_);
    cublas().run(w2, layer.w2, right_.data(), result_.data(), stream_);
  };
  const double flops = 6.0 * static_cast<double>(rows) * static_cast<double>(layer.hidden_dim) *
                       static_cast<double>(layer.intermediate_dim);
  return Ceiling{std::make_unique<FunctionWorkload>(std::move(body)), flops};
}

std::size_t CudaBenchDevice::stream_bytes() const {
  constexpr std::size_t kGranularity = std::size_t{1} << 20;
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  DISTMOE_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const std::size_t share = total_bytes / kStreamShareOfMemory / kGranularity * kGranularity;
  return std::min(kMostStreamBytes, share);
}

void* CudaBenchDevice::stream_source() {
  if (stream_source_ == nullptr) {
    stream_source_ = allocate(stream_bytes());
    fill(stream_source_, stream_bytes());
  }
  return stream_source_;
}

void* CudaBenchDevice::stream_target() {
  if (stream_target_ == nullptr) stream_target_ = allocate(stream_bytes());
  return stream_target_;
}

Ceiling CudaBenchDevice::memory_copy() {
  auto body = [this, from = stream_source(), to = stream_target(), bytes = stream_bytes()] {
    DISTMOE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
  };
  return {std::make_unique<FunctionWorkload>(std::move(body)),
          2.0 * static_cast<double>(stream_bytes())};
}

Ceiling CudaBenchDevice::memory_read() {
  auto* sink = static_cast<unsigned*>(allocate(sizeof(unsigned)));
  auto body = [this, data = stream_source(), sink, bytes = stream_bytes()] {
    DISTMOE_CUDA_CHECK(launch_read(data, bytes, sink, stream_));
  };
  return {std::make_unique<FunctionWorkload>(std::move(body)), static_cast<double>(stream_bytes())};
}

Ceiling CudaBenchDevice::memory_write() {
  auto body = [this, to = stream_target(), bytes = stream_bytes()] {
    DISTMOE_CUDA_CHECK(launch_write(to, bytes, stream_));
  };
  return {std::make_unique<FunctionWorkload>(std::move(body)), static_cast<double>(stream_bytes())};
}

bool CudaBenchDevice::can_address(std::int64_t peer_device) const {
  if (peer_device == device_) return true;
  const cudaError_t error = cudaDeviceEnablePeerAccess(static_cast<int>(peer_device), 0);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
}

std::optional<Ceiling> CudaBenchDevice::link_read(RankGroup& group, std::span<const int> readers,
                                                  std::string& why_not) {
  SymmetricMemory* shared = group.communicator()->symmetric_memory();
  if (shared != nullptr) {
    link_ = shared->allocate(kLinkBytes);
    communicator_ = group.communicator();
  } else {
    link_ = allocate(kLinkBytes);
  }
  fill(link_, kLinkBytes);
  const std::vector<LinkRecord> records =
      group.all_gather(LinkRecord{.base = link_, .process = getpid(), .device = device_});
  // Around the ring, so that every reader is read while it reads. Other ranks only agree.
  const auto own = std::ranges::find(readers, group.rank());
  const bool is_reader = own != readers.end();
  const int next = is_reader && own + 1 != readers.end() ? *(own + 1) : readers.front();
  const LinkRecord& peer = records[static_cast<std::size_t>(next)];
  const void* address = nullptr;
  if (shared != nullptr) {
    address = shared->peer_pointer(link_, next);
  } else if (peer.process == getpid() && can_address(peer.device)) {
    address = peer.base;
  }
  const std::vector<int> has_address = group.all_gather(address != nullptr || !is_reader ? 1 : 0);
  if (std::ranges::count(has_address, 0) > 0) {
    why_not = "the link: a rank cannot address the memory of another one's device";
    return std::nullopt;
  }
  void* to = is_reader ? allocate(kLinkBytes) : nullptr;
  auto body = [this, to, address] {
    DISTMOE_CUDA_CHECK(launch_pull(to, address, kLinkBytes, stream_));
  };
  return Ceiling{std::make_unique<FunctionWorkload>(std::move(body)),
                 static_cast<double>(kLinkBytes)};
}

}  // namespace

std::unique_ptr<BenchDevice> make_cuda_bench_device(int device) {
  return std::make_unique<CudaBenchDevice>(device);
}

}  // namespace distmoe::tools
