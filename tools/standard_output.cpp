// SPDX-License-Identifier: Apache-2.0
#include "standard_output.hpp"

#include <cstdio>

#include "output_error.hpp"

namespace distmoe::tools {

void write_stdout(std::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) != 0 || !is_written) throw OutputError("cannot write to stdout");
}

}  // namespace distmoe::tools
