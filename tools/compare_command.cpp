// SPDX-License-Identifier: Apache-2.0
//
// `distmoe compare`: what every precision costs in accuracy, and saves in bytes, on the layers of a
// checkpoint.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"
#include "io/safetensors.hpp"
#include "option_declaration.hpp"
#include "plan/option_names.hpp"
#include "precision_table.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

constexpr const char* kFooter =
    "Runs every layer that the input has, in bf16, mxfp8, nvfp4 and mxfp4 (weights alone), on one "
    "rank.\nrelative L2 = |y - y_ref| / |y_ref|; without a y_ref the reference is bf16. The worst "
    "row is the\ntoken with the largest relative L2 of its own.\n\n"
    "Exit code: 0 a table was made, 1 and a y in it is NaN or infinite where its reference is "
    "not,\n"
    "2 wrong arguments or files, 3 failure at run time.\n\n"
    "Examples:\n"
    "  distmoe compare --checkpoint testdata/gptoss\n"
    "  distmoe compare --checkpoint DIR --layer 3 --input captured.safetensors --json\n";

struct CompareOptions {
  std::filesystem::path checkpoint;
  std::filesystem::path input;  ///< empty: routed_experts.safetensors of the checkpoint
  std::optional<std::int64_t> layer;
  bool json = false;
};

/// Those of `layers` that the file has tensors of.
std::vector<std::int64_t> layers_of_input(const std::filesystem::path& path,
                                          const std::vector<std::int64_t>& layers) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<std::int64_t> found;
  std::ranges::copy_if(layers, std::back_inserter(found), [&](std::int64_t layer) {
    const std::string prefix = concat("layer", layer, '.');
    return std::ranges::any_of(file.tensors(), [&](const StoredTensor& tensor) {
      return tensor.name.starts_with(prefix);
    });
  });
  DISTMOE_CHECK(!found.empty(), kInvalidArgument, path, " has tensors 'layerN.*' of none of the ",
                layers.size(), " layers with experts; --layer names the one that it is of");
  return found;
}

/// A precision is as far away as it is, but what is no number is no result.
ExitCode judge(const PrecisionTable& table) {
  const auto bad = std::ranges::find_if_not(table.rows, is_finite);
  if (bad == table.rows.end()) return ExitCode::kSuccess;
  print_error(concat("layer ", bad->layer, " in ", option_name(bad->precision),
                     " is no result: NaN or infinite are ", not_finite_text(bad->comparison)));
  return ExitCode::kOutsideTolerance;
}

class CompareCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "compare"; }
  const char* summary() const noexcept override {
    return "Compare every precision on the layers of a checkpoint: error, bytes, worst row";
  }
  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    add(app, "--checkpoint", "DIR", "Hugging Face folder: config.json and safetensors files",
        [this](const std::string& text) { options_.checkpoint = text; })
        ->required();
    add(app, "--input", "FILE",
        "Captured input as `distmoe run` reads it [DIR/routed_experts.safetensors]",
        [this](const std::string& text) { options_.input = text; });
    add(app, "--layer", "N", "This layer alone [all that the input has]",
        [this](const std::string& text) {
          options_.layer =
              parse_integer("--layer", text, 0, std::numeric_limits<std::int32_t>::max());
        });
    app.add_flag("--json", options_.json, "Print one JSON object on stdout and nothing else");
  }
  ExitCode execute() override;

 private:
  CompareOptions options_;
};

ExitCode CompareCommand::execute() {
  Progress progress(true);
  progress.show("reading the checkpoint");
  const Checkpoint checkpoint = Checkpoint::open(options_.checkpoint);
  const std::filesystem::path path =
      options_.input.empty() ? options_.checkpoint / "routed_experts.safetensors" : options_.input;
  const std::vector<std::int64_t> layers = options_.layer
                                               ? std::vector{*options_.layer}
                                               : layers_of_input(path, checkpoint.moe_layers());
  PrecisionTable table{.checkpoint = options_.checkpoint.string(),
                       .architecture = checkpoint.architecture()};
  std::int64_t done = 0;
  for (const std::int64_t layer : layers) {
    progress.show("comparing layer", ++done, std::ssize(layers));
    const RoutedInputFile input = RoutedInputFile::open(path, layer);
    DISTMOE_CHECK(input.hidden_dim() == checkpoint.shape().hidden_dim, kInvalidArgument, "layer ",
                  layer, " of ", path, " has x ", input.input().x_TD.describe(),
                  ", but the hidden size of the checkpoint is ", checkpoint.shape().hidden_dim);
    table.has_reference = table.has_reference && input.y_ref().is_given();
    for (PrecisionRow& row : compare_precisions(checkpoint, layer, input)) {
      table.rows.push_back(std::move(row));
    }
  }
  progress.clear();
  write_stdout(options_.json ? json_of(table) : text_of(table));
  return judge(table);
}

}  // namespace

std::unique_ptr<Subcommand> make_compare_command() { return std::make_unique<CompareCommand>(); }

}  // namespace distmoe::tools
