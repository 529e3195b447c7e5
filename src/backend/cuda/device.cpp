// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/device.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "core/check.hpp"

namespace distmoe::cuda {
namespace {

constexpr int kHopper = 9;

/// "13.0"
std::string version_text(int version) { return concat(version / 1000, ".", version % 1000 / 10); }

/// NOTE: the runtime says "insufficient" also where there is no driver at all, whose version is 0.
std::string driver_problem() {
  int version = 0;
  cudaDriverGetVersion(&version);
  if (version == 0) return "no NVIDIA driver is installed";
  return concat("the NVIDIA driver supports CUDA ", version_text(version), "; this build needs ",
                version_text(CUDART_VERSION));
}

}  // namespace

const bool kIsCompiled = true;

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string why_unavailable() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver) return driver_problem();
    return cudaGetErrorString(error);
  }
  if (count == 0) return "no CUDA device is present";
  std::string first_reason;
  for (int device = 0; device < count; ++device) {
    std::string reason = why_unusable(device);
    if (reason.empty()) return {};
    if (device == 0) first_reason = std::move(reason);
  }
  return first_reason;
}

std::string why_unusable(int device) {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major == kHopper) return {};
  return concat("the kernels are built for compute capability 9.0 (Hopper); device ", device,
                " has ", major, ".x");
}

DeviceScope::DeviceScope() { DISTMOE_CUDA_CHECK(cudaGetDevice(&previous_)); }

DeviceScope::DeviceScope(int device) : DeviceScope() { DISTMOE_CUDA_CHECK(cudaSetDevice(device)); }

DeviceScope::~DeviceScope() { cudaSetDevice(previous_); }

DeviceBuffer::DeviceBuffer(std::size_t bytes, int device) : bytes_(bytes), device_(device) {
  const DeviceScope scope(device);
  if (bytes > 0) DISTMOE_CUDA_CHECK(cudaMalloc(&data_, bytes));
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(device_);
  cudaFree(data_);
  cudaSetDevice(previous);
}

void DeviceBuffer::upload(const void* source, std::size_t bytes) const {
  const DeviceScope scope(device_);
  if (bytes == 0) return;
  DISTMOE_CUDA_CHECK(cudaMemcpy(data_, source, bytes, cudaMemcpyHostToDevice));
  // NOTE: from pageable memory cudaMemcpy returns once the bytes are staged.
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(cudaStreamLegacy));
}

void DeviceBuffer::download(void* destination, std::size_t bytes) const {
  const DeviceScope scope(device_);
  if (bytes > 0) DISTMOE_CUDA_CHECK(cudaMemcpy(destination, data_, bytes, cudaMemcpyDeviceToHost));
}

struct DeviceGraph::Recording {
  int device = 0;
  cudaStream_t stream = nullptr;
  cudaGraphExec_t executable = nullptr;

  explicit Recording(int on_device) : device(on_device) {
    DISTMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Recording() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    cudaStreamDestroy(stream);
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
};

DeviceGraph::DeviceGraph(int device, const std::function<void(void*)>& record) {
  const DeviceScope scope(device);
  recording_ = std::make_unique<Recording>(device);
  const cudaStream_t stream = recording_->stream;
  cudaGraph_t graph = nullptr;
  DISTMOE_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    record(stream);
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    throw;
  }
  DISTMOE_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  const cudaError_t error = cudaGraphInstantiate(&recording_->executable, graph, 0);
  cudaGraphDestroy(graph);
  DISTMOE_CUDA_CHECK(error);
  DISTMOE_CUDA_CHECK(cudaGraphUpload(recording_->executable, stream));
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(stream));
}

DeviceGraph::~DeviceGraph() = default;

void DeviceGraph::replay() {
  const DeviceScope scope(recording_->device);
  launch(recording_->stream);
  DISTMOE_CUDA_CHECK(cudaStreamSynchronize(recording_->stream));
}

void DeviceGraph::launch(void* stream) {
  const DeviceScope scope(recording_->device);
  DISTMOE_CUDA_CHECK(cudaGraphLaunch(recording_->executable, static_cast<cudaStream_t>(stream)));
}

}  // namespace distmoe::cuda
