// SPDX-License-Identifier: Apache-2.0
#include "distmoe/error.hpp"

#include "core/check.hpp"

namespace distmoe {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid_argument";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kCapacityExceeded: return "capacity_exceeded";
    case ErrorCode::kOutOfMemory: return "out_of_memory";
    case ErrorCode::kPeerMismatch: return "peer_mismatch";
    case ErrorCode::kPeerLost: return "peer_lost";
    case ErrorCode::kClosed: return "closed";
    case ErrorCode::kDeviceFault: return "device_fault";
    case ErrorCode::kIo: return "io";
    case ErrorCode::kInternal: return "internal";
  }
  return "unknown";
}

Error::Error(ErrorCode code, const std::string& message)
    : std::runtime_error(message), code_(code) {}

Error::~Error() = default;

void throw_error(ErrorCode code, const std::string& message) { throw Error(code, message); }

}  // namespace distmoe
