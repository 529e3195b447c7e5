// SPDX-License-Identifier: Apache-2.0
#include "precision_options.hpp"

#include "option_declaration.hpp"

namespace distmoe::tools {

void add_precision_options(CLI::App& app, Precision& precision, Pipeline& pipeline) {
  add(app, "--precision", "bf16|mxfp8|nvfp4|mxfp4", "Precision of the products [bf16]",
      [&precision](const std::string& text) {
        precision = static_cast<Precision>(
            parse_name("--precision", text, {"bf16", "mxfp8", "nvfp4", "mxfp4"}));
      });
  add(app, "--pipeline", "staged|mega", "Launch topology of block-scaled precisions [staged]",
      [&pipeline](const std::string& text) {
        pipeline = static_cast<Pipeline>(parse_name("--pipeline", text, {"staged", "mega"}));
      });
}

double default_tolerance(Precision precision) noexcept {
  switch (precision) {
    case Precision::kBF16: break;
    case Precision::kMXFP8: return 0.033;
    case Precision::kNVFP4: return 0.115;
    case Precision::kMXFP4: return 0.10;
  }
  return 8e-3;
}

}  // namespace distmoe::tools
