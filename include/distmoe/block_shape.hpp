// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe {

/// Which elements of a matrix share a scale: 32 (NVFP4: 16) along a row, 32 along a column, or
/// 32 x 32.
enum class BlockShape : std::uint8_t { kRows, kColumns, kTiles };

}  // namespace distmoe
