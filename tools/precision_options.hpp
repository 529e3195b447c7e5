// SPDX-License-Identifier: Apache-2.0
//
// Options about low precisions that commands have alike, and what a precision means to a command.
#pragma once

#include "distmoe/config.hpp"

namespace CLI {
class App;
}

namespace distmoe::tools {

/// --precision and --pipeline.
void add_precision_options(CLI::App& app, Precision& precision, Pipeline& pipeline);

/// Relative L2 distance to an exact reference that a precision stays within.
double default_tolerance(Precision precision) noexcept;

}  // namespace distmoe::tools
