// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of an operand or a result lie. Shared by host and device.
#pragma once

#include <cstdint>

#include "formats/host_device.hpp"

namespace distmoe::cuda {

/// Rows found through a table of addresses, or row r at base + r * stride_bytes where there is
/// none. Every row starts at a multiple of 16 bytes.
struct RowTable {
  const std::uint64_t* address = nullptr;  ///< [R]
  const std::uint64_t* base_at = nullptr;  ///< on the device: what the base is, in place of `base`
  std::uint64_t base = 0;
  std::int64_t stride_bytes = 0;
};

/// Of a table without addresses.
DISTMOE_HOST_DEVICE inline std::uint64_t base_of(const RowTable& table) {
  return table.base_at != nullptr ? *table.base_at : table.base;
}

DISTMOE_HOST_DEVICE inline std::uint64_t row_address(const RowTable& table, std::int64_t row) {
  return table.address != nullptr
             ? table.address[row]
             : base_of(table) + static_cast<std::uint64_t>(row * table.stride_bytes);
}

}  // namespace distmoe::cuda
