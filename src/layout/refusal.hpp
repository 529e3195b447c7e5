// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe {

/// Why a rank cannot take part; travels inside the records that ranks exchange.
struct Refusal {
  static constexpr std::int32_t kNone = -1;
  static constexpr int kMaxMessage = 960;

  std::int32_t code = kNone;       ///< an ErrorCode, or kNone
  char message[kMaxMessage] = {};  ///< zero-terminated, cut where longer
};

}  // namespace distmoe
