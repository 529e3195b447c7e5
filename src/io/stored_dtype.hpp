// SPDX-License-Identifier: Apache-2.0
//
// The element types of safetensors, by the names that its headers use.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "distmoe/tensor.hpp"

namespace distmoe {

/// Empty for a type that distmoe does not have.
std::optional<DType> dtype_of_stored_name(std::string_view name);

/// Bits of one element; empty for a name that is no type of the format as we know it.
std::optional<std::int64_t> bits_of_stored_name(std::string_view name);

/// "BF16" of kBF16.
std::string_view stored_name_of(DType dtype);

}  // namespace distmoe
