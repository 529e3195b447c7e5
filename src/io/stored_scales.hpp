// SPDX-License-Identifier: Apache-2.0
//
// The scales of coded matrices, read with the checks that every loader makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/expert_catalog.hpp"

namespace distmoe {

/// What a tensor [E, ...] has of one expert.
std::span<const std::byte> slice_of_expert(const TensorRef& ref, std::int64_t expert);

/// The scales of an FP8 matrix as FP32. Throws io for one that is not finite.
std::vector<float> read_fp8_scales(const TensorRef& ref, std::int64_t expert);

/// The scale bytes of one expert's MXFP8, MXFP4 or NVFP4 matrix: its own tensor, or its slice of a
/// fused one. Throws io for one that no weight may have, with its place.
std::span<const std::byte> read_scale_bytes(const MatrixRef& matrix, std::int64_t expert);

/// The global scale of an NVFP4 matrix. Throws io unless it is finite and above 0.
float read_global_scale(const MatrixRef& matrix, std::int64_t expert);

}  // namespace distmoe
