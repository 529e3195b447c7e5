// SPDX-License-Identifier: Apache-2.0
//
// Numbers as tables and pages show them.
#pragma once

#include <optional>
#include <string>

namespace distmoe::tools {

/// With `digits` behind the point.
std::string number_text(double value, int digits);
/// "-" where there is none.
std::string number_or_dash(const std::optional<double>& value, int digits);
/// "64.3 %".
std::string percent_text(double fraction);

}  // namespace distmoe::tools
