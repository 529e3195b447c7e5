// SPDX-License-Identifier: Apache-2.0
//
// Byte and row counts as people read them.
#pragma once

#include <cstdint>
#include <string>

namespace distmoe {

/// "1,073,741,824"
std::string grouped(std::int64_t value);
/// "1.00 GiB"; whole bytes below 1 KiB.
std::string human_bytes(std::int64_t bytes);
/// "1,073,741,824 B (1.00 GiB)"; without the second form below 1 KiB.
std::string exact_and_human_bytes(std::int64_t bytes);

}  // namespace distmoe
