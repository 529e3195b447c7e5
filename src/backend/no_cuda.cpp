// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend of a build without CUDA.
#include "backend/backend.hpp"
#include "backend/cuda/device.hpp"
#include "core/check.hpp"

namespace distmoe::cuda {

std::string why_unavailable() { return "this build of distmoe has no CUDA backend"; }

// NOLINTNEXTLINE(performance-unnecessary-value-param): the signature is the other build's
std::unique_ptr<Backend> make_backend(BackendSetup) {
  throw_error(ErrorCode::kUnsupported, why_unavailable());
}

const bool kIsCompiled = false;

int device_count() { return 0; }

DeviceBuffer::DeviceBuffer(std::size_t bytes, int device) : bytes_(bytes), device_(device) {
  throw_error(ErrorCode::kUnsupported, why_unavailable());
}
DeviceBuffer::~DeviceBuffer() = default;
void DeviceBuffer::upload(const void*, std::size_t) const {}
void DeviceBuffer::download(void*, std::size_t) const {}

struct DeviceGraph::Recording {};
DeviceGraph::DeviceGraph(int, const std::function<void(void*)>&) {
  throw_error(ErrorCode::kUnsupported, why_unavailable());
}
DeviceGraph::~DeviceGraph() = default;
void DeviceGraph::replay() {}
void DeviceGraph::launch(void*) {}

}  // namespace distmoe::cuda
