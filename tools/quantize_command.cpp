// SPDX-License-Identifier: Apache-2.0
//
// `distmoe quantize`: a checkpoint with its experts in another format.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "core/check.hpp"
#include "option_declaration.hpp"
#include "plan/byte_text.hpp"
#include "progress.hpp"
#include "quantised_checkpoint.hpp"
#include "quantised_experts.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

constexpr StoredFormat kFormats[] = {StoredFormat::kMxfp8, StoredFormat::kMxfp4,
                                     StoredFormat::kNvfp4};

constexpr const char* kFooter =
    "Writes config.json and model.safetensors. Tensors that are no expert's matrices are "
    "copied.\n\n"
    "Exit code: 0, 2 wrong arguments or files, 3 the format cannot hold the weights or writing "
    "failed.\n\n"
    "Examples:\n"
    "  distmoe quantize --checkpoint testdata/qwen3moe --format nvfp4 --output "
    "/tmp/qwen3moe-nvfp4\n"
    "  distmoe quantize --checkpoint testdata/gptoss --format mxfp4 --output /tmp/gptoss-mxfp4\n";

class QuantizeCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "quantize"; }
  const char* summary() const noexcept override {
    return "Write a checkpoint with its experts as MXFP8, MXFP4 or NVFP4";
  }

  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    add(app, "--checkpoint", "DIR", "Folder with config.json and safetensors",
        [this](const std::string& text) { request_.checkpoint = text; })
        ->required();
    add(app, "--format", "mxfp8|mxfp4|nvfp4", "Format of the experts' matrices",
        [this](const std::string& text) {
          const std::size_t index = parse_name("--format", text, {"mxfp8", "mxfp4", "nvfp4"});
          request_.format = kFormats[index];
        })
        ->required();
    add(app, "--output", "DIR", "Folder to write, which does not exist yet or is empty",
        [this](const std::string& text) { request_.output = text; })
        ->required();
    app.add_flag("--json", json_, "Print one JSON object on stdout and nothing else");
  }

  ExitCode execute() override {
    Progress progress(true);
    const QuantiseSummary summary =
        write_quantised_checkpoint(request_, [&](std::int64_t done, std::int64_t total) {
          progress.show("quantising experts", done, total);
        });
    progress.clear();
    write_stdout(json_ ? json_of(summary) : text_of(summary));
    return ExitCode::kSuccess;
  }

 private:
  std::string json_of(const QuantiseSummary& summary) const {
    const nlohmann::ordered_json json = {{"checkpoint", request_.checkpoint.string()},
                                         {"output", request_.output.string()},
                                         {"architecture", summary.architecture},
                                         {"format", format_name(request_.format)},
                                         {"layers", summary.num_layers},
                                         {"experts", summary.num_experts},
                                         {"kept_experts", summary.num_kept},
                                         {"bf16_bytes", summary.bf16_bytes},
                                         {"coded_bytes", summary.coded_bytes},
                                         {"copied_bytes", summary.copied_bytes}};
    return json.dump(2) + '\n';
  }

  static std::string kept_text(const QuantiseSummary& summary) {
    return summary.num_kept == 0 ? "" : concat(", codes of ", summary.num_kept, " kept");
  }

  std::string text_of(const QuantiseSummary& summary) const {
    return concat("checkpoint      ", request_.checkpoint.string(), " (", summary.architecture,
                  ")\noutput          ", request_.output.string(), "\nformat          ",
                  format_name(request_.format), "\nexperts         ", summary.num_layers, " x ",
                  summary.num_experts, kept_text(summary), "\nmatrices        ",
                  human_bytes(summary.coded_bytes), ", ", human_bytes(summary.bf16_bytes),
                  " in bf16\ncopied          ", human_bytes(summary.copied_bytes), '\n');
  }

  QuantiseRequest request_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_quantize_command() { return std::make_unique<QuantizeCommand>(); }

}  // namespace distmoe::tools
