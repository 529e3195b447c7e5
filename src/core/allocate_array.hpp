// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <string_view>

#include "core/checked_math.hpp"

namespace distmoe {

/// `count` values that are not initialised. Throws out_of_memory, with the bytes and `what` they
/// are for.
template <typename T>
std::unique_ptr<T[]> allocate_array(std::int64_t count, std::string_view what) {
  const std::int64_t bytes = checked_mul(count, sizeof(T));
  std::unique_ptr<T[]> array(new (std::nothrow) T[static_cast<std::size_t>(count)]);
  DISTMOE_CHECK(array != nullptr, kOutOfMemory, "no memory for ", bytes, " bytes of ", what);
  return array;
}

}  // namespace distmoe
