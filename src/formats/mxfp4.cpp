// SPDX-License-Identifier: Apache-2.0
#include "formats/mxfp4.hpp"

#include <array>
#include <cstddef>

#include "formats/e2m1.hpp"

namespace distmoe {

void decode_mxfp4(const std::uint8_t* blocks, const E8M0* scales, std::int64_t num_blocks,
                  BF16* out) {
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const float scale = to_float(scales[block]);
    std::array<BF16, 16> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      table[code] = to_bf16(to_float(E2M1{static_cast<std::uint8_t>(code)}) * scale);
    }
    for (std::int64_t i = 0; i < kMxfp4BlockBytes; ++i) {
      const std::uint8_t byte = blocks[block * kMxfp4BlockBytes + i];
      out[block * kMxfp4BlockSize + 2 * i] = table[even_e2m1(byte).bits];
      out[block * kMxfp4BlockSize + 2 * i + 1] = table[odd_e2m1(byte).bits];
    }
  }
}

}  // namespace distmoe
