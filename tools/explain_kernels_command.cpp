// SPDX-License-Identifier: Apache-2.0
//
// `distmoe explain-kernels`: which kernels a call runs on a GPU, in which shape and why. No GPU is
// asked.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "distmoe/config.hpp"
#include "kernel_report.hpp"
#include "option_declaration.hpp"
#include "shape_options.hpp"
#include "standard_output.hpp"
#include "subcommand.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxCount = 2147483647;
constexpr int kMaxCalls = 64;
/// Of an H200 and an H100 SXM.
constexpr std::int64_t kDefaultSms = 132;
/// Far more than any GPU has, and few enough that blocks of a launch count in 32 bits.
constexpr std::int64_t kMaxSms = 65536;

constexpr const char* kFooter =
    "Routing is balanced: every expert gets as many rows. The rank is the first, which owns most "
    "experts.\n\n"
    "Exit code: 0, 2 wrong arguments or files, 3 the kernels do not support the sizes.\n\n"
    "Examples:\n"
    "  distmoe explain-kernels --model Qwen3-30B-A3B --tokens 64 8192 --ranks 2\n"
    "  distmoe explain-kernels --model DeepSeek-V3 --tokens 8192 --ranks 8 --json\n"
    "  distmoe explain-kernels --hidden 4096 --intermediate 1536 --top-k 8 --experts 128 \\\n"
    "      --tokens 1024 --ranks 4 --ranks-per-device 4 --kernel-choice fixed\n";

class ExplainKernelsCommand final : public Subcommand {
 public:
  const char* name() const noexcept override { return "explain-kernels"; }
  const char* summary() const noexcept override {
    return "Say which GPU kernels a call runs, in which shape and why; needs no GPU";
  }

  void add_options(CLI::App& app) override {
    app.footer(kFooter);
    app.add_option_function<std::vector<std::string>>(
           "--tokens",
           [this](const std::vector<std::string>& texts) {
             for (const std::string& text : texts) {
               tokens_.push_back(parse_integer("--tokens", text, 1, kMaxCount));
             }
           },
           "Tokens of each rank in a call (T), up to 64 numbers")
        ->type_name("N")
        ->expected(1, kMaxCalls)
        ->required();
    add_shape_options(app, shape_);
    add_count(app, "--ranks", "Expert-parallel ranks (P) [1]", kMaxCount,
              [this](std::int64_t value) { inputs_.num_ranks = value; });
    add_count(app, "--ranks-per-device", "Ranks that share a GPU [1]", kMaxCount,
              [this](std::int64_t value) { inputs_.ranks_on_device = value; });
    add_count(app, "--sms", "Streaming multiprocessors of the GPU [132, as an H200 has]", kMaxSms,
              [this](std::int64_t value) { inputs_.device_sms = value; });
    add(app, "--kernel-choice", "tuned|fixed", "As Config::kernel_choice [tuned]",
        [this](const std::string& text) {
          inputs_.kernel_choice =
              static_cast<KernelChoice>(parse_name("--kernel-choice", text, {"tuned", "fixed"}));
        });
    add(app, "--combine", "per_route|per_rank", "As Config::combine [per_route]",
        [this](const std::string& text) {
          inputs_.combine =
              static_cast<Combine>(parse_name("--combine", text, {"per_route", "per_rank"}));
        });
    app.add_flag("--json", json_, "Print one JSON object on stdout and nothing else");
  }

  ExitCode execute() override {
    DISTMOE_CHECK(inputs_.ranks_on_device <= inputs_.num_ranks, kInvalidArgument,
                  "--ranks-per-device is ", inputs_.ranks_on_device, "; legal: 1 to --ranks, ",
                  inputs_.num_ranks);
    Config config;
    config.inference = true;
    config.max_tokens = *std::ranges::max_element(tokens_);
    const std::string title = apply_shape(shape_, config);
    validate(config);
    cuda::ChoiceInputs inputs = inputs_;
    inputs.precision = config.precision;
    inputs.hidden_dim = config.hidden_dim;
    inputs.intermediate_dim = config.intermediate_dim;
    inputs.top_k = config.top_k;
    inputs.num_experts = config.num_experts;
    const ExplainedKernels kernels = explain_kernels(title, inputs, tokens_);
    write_stdout(json_ ? json_of(kernels) : text_of(kernels));
    return ExitCode::kSuccess;
  }

 private:
  ShapeOptions shape_;
  cuda::ChoiceInputs inputs_{.device_sms = kDefaultSms};
  std::vector<std::int64_t> tokens_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_explain_kernels_command() {
  return std::make_unique<ExplainKernelsCommand>();
}

}  // namespace distmoe::tools
