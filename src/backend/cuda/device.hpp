// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace distmoe::cuda {

/// Whether this build has the CUDA backend at all.
extern const bool kIsCompiled;

/// 0 where there is no driver or no device.
int device_count();

/// Why the kernels do not run on a device that is there; empty where they do.
std::string why_unusable(int device);

/// Makes a device current for this thread while it lives.
class DeviceScope {
 public:
  /// Leaves the device as it is, until it is changed.
  DeviceScope();
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
};

/// Owned device memory, for tools and tests; contexts carve their own.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(std::size_t bytes, int device);
  // NOLINTNEXTLINE(performance-trivially-destructible): a build without CUDA frees nothing
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  // Here, where both builds find them.
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(device_, other.device_);
    return *this;
  }

  void* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  /// Both complete before they return.
  void upload(const void* source, std::size_t bytes) const;
  void download(void* destination, std::size_t bytes) const;

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int device_ = 0;
};

/// A CUDA graph of what `record` enqueues on the stream that it gets, for tools and tests.
class DeviceGraph {
 public:
  DeviceGraph(int device, const std::function<void(void* stream)>& record);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  /// Returns when the device has done all of it.
  void replay();
  /// Enqueues it on `stream`, a cudaStream_t of the same device.
  void launch(void* stream);

 private:
  struct Recording;
  std::unique_ptr<Recording> recording_;
};

}  // namespace distmoe::cuda
