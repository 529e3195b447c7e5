// SPDX-License-Identifier: Apache-2.0
#include "core/profiler_range.hpp"

#if defined(DISTMOE_WITH_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

namespace distmoe {
namespace {

#if defined(DISTMOE_WITH_NVTX)
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("distmoe");
  return handle;
}

void push(const char* name) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop() { nvtxDomainRangePop(domain()); }
#else
void push(const char* /*name*/) {}
void pop() {}
#endif

}  // namespace

void ProfilerRange::begin(const char* name) {
  end();
  push(name);
  is_open_ = true;
}

void ProfilerRange::end() {
  if (is_open_) pop();
  is_open_ = false;
}

}  // namespace distmoe
