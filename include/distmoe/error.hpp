// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "distmoe/export.hpp"

namespace distmoe {

/// What went wrong, coarse enough to act upon. The message of the exception has the values.
enum class ErrorCode {
  kInvalidArgument,   ///< an argument breaks the contract; nothing was written
  kUnsupported,       ///< legal, but this build or machine cannot do it
  kCapacityExceeded,  ///< routing needs more rows than the memory plan has; every rank gets it
  kOutOfMemory,       ///< an allocation failed, of the plan first of all
  kPeerMismatch,      ///< ranks disagree about the configuration or about a call
  kPeerLost,          ///< a rank did not arrive within the timeout, left or died
  kClosed,            ///< the context was closed, or an earlier fault left only close()
  kDeviceFault,       ///< the accelerator reported an error
  kIo,                ///< a file could not be read, written or understood
  kInternal,          ///< a bug of distmoe
};

/// The snake_case name of a code: "capacity_exceeded".
DISTMOE_EXPORT const char* to_string(ErrorCode code) noexcept;

/// The one exception type of the library. `what()` says what was given, what is legal and, where
/// they are known, which rank, layer and call it was.
class DISTMOE_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ~Error() override;

  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace distmoe
