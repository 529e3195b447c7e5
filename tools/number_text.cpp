// SPDX-License-Identifier: Apache-2.0
#include "number_text.hpp"

#include <iomanip>
#include <sstream>

namespace distmoe::tools {

std::string number_text(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string number_or_dash(const std::optional<double>& value, int digits) {
  return value ? number_text(*value, digits) : "-";
}

std::string percent_text(double fraction) { return number_text(100.0 * fraction, 1) + " %"; }

}  // namespace distmoe::tools
