// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfenv>

namespace distmoe {

/// The floating-point environment that the numerics contract is written for, on this thread while
/// it lives: rounding to nearest, subnormals kept, no traps. A caller may have another one
/// (torch.set_flush_denormal, std::fesetround): it has it again afterwards, and its flags.
/// NOTE: FE_DFL_ENV also ends flush-to-zero and denormals-are-zero, with glibc on x86-64 and ARM64.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() noexcept {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

}  // namespace distmoe
