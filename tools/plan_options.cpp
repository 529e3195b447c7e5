// SPDX-License-Identifier: Apache-2.0
#include "plan_options.hpp"

#include <CLI/CLI.hpp>
#include <array>
#include <cctype>
#include <limits>
#include <utility>

#include "core/check.hpp"
#include "option_declaration.hpp"
#include "option_values.hpp"
#include "precision_options.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

constexpr const char* kFooter =
    "Prints what one rank allocates, region by region, and what happens past each limit. A plan "
    "that does\nnot fit --budget says so and what would fit; the exit code stays 0.\n\n"
    "Exit code: 0 a plan was made, 2 wrong arguments or files.\n\n"
    "Examples:\n"
    "  distmoe plan --model Qwen3-30B-A3B --tokens 8192 --ep 8\n"
    "  distmoe plan --model DeepSeek-V3 --tokens 4096 --ep 32 --slot-factor 1 --budget 80GiB\n"
    "  distmoe plan --checkpoint testdata/gptoss --tokens 512 --inference --json\n"
    "  distmoe plan --tokens 4096 --hidden 4096 --intermediate 14336 --top-k 8 --experts 128 \\\n"
    "      --ep 16 --layers 32 --device-factor 1.5 --total-factor 16 --svg plan.svg\n";

void add_shape(CLI::App& app, PlanOptions& options) {
  add_count(app, "--tokens", "Tokens of a rank in a call, at most (T)", kMaxCount,
            [&](std::int64_t value) { options.config.max_tokens = value; })
      ->required();
  add_shape_options(app, options.shape);
  add_count(app, "--ep", "Expert-parallel ranks (P) [1]", kMaxCount,
            [&](std::int64_t value) { options.ep_size = static_cast<int>(value); });
}

void add_slots(CLI::App& app, PlanOptions& options) {
  Config& config = options.config;
  add_count(app, "--layers", "MoE layers of a slot [those of the model, or 1]", kMaxSize,
            [&](std::int64_t value) { options.layers = value; });
  add(app, "--slots", "N", "Activation slots [1]", [&](const std::string& text) {
    config.num_activation_slots = parse_integer("--slots", text, 0, kMaxSize);
  });
  add(app, "--slot-bytes", "BYTES", "Bytes of a slot [the minimum: everything is recomputed]",
      [&](const std::string& text) {
        config.activation_slot_bytes = parse_bytes("--slot-bytes", text);
      });
  add(app, "--slot-factor", "Q", "Slot from the minimum (0) to saving balanced routing (1)",
      [&](const std::string& text) {
        config.activation_slot_capacity_factor = parse_real("--slot-factor", text, Zero::kLegal);
      });
  add(app, "--activation-policy", "full|lean", "What a saving forward keeps [full]",
      [&](const std::string& text) {
        config.activation_policy = static_cast<ActivationPolicy>(
            parse_name("--activation-policy", text, {"full", "lean"}));
      });
}

void add_capacity(CLI::App& app, PlanOptions& options) {
  Config& config = options.config;
  add(app, "--device-factor", "F", "Rows planned, in units of T*K of a rank [2]",
      [&](const std::string& text) {
        config.device_scratch_capacity_factor = parse_real("--device-factor", text, Zero::kIllegal);
      });
  add(app, "--total-factor", "F", "The same with scratch in host memory [none]",
      [&](const std::string& text) {
        config.host_scratch = HostScratch{parse_real("--total-factor", text, Zero::kIllegal), true};
      });
  add(app, "--distinct-experts", "true|false", "A token names an expert at most once [true]",
      [&](const std::string& text) {
        config.distinct_experts = parse_name("--distinct-experts", text, {"false", "true"}) == 1;
      });
  add_precision_options(app, config.precision, config.pipeline);
  add(app, "--combine", "per_route|per_rank", "What travels back of a token [per_route]",
      [&](const std::string& text) {
        config.combine =
            static_cast<Combine>(parse_name("--combine", text, {"per_route", "per_rank"}));
      });
  app.add_flag("--inference", config.inference, "Scratch only: nothing is saved");
}

void add_target(CLI::App& app, PlanOptions& options) {
  add(app, "--backend", "cpu|cuda", "What the context runs on [cpu]", [&](const std::string& text) {
    options.target.backend =
        static_cast<BackendKind>(parse_name("--backend", text, {"cpu", "cuda"}));
  });
  add_count(app, "--threads",
            "Worker threads of a rank, each with its own workspace; of no effect for cuda [1]",
            kMaxCount,
            [&](std::int64_t value) { options.target.num_threads = static_cast<int>(value); });
}

}  // namespace

void add_plan_options(CLI::App& app, PlanOptions& options) {
  app.footer(kFooter);
  add_shape(app, options);
  add_slots(app, options);
  add_capacity(app, options);
  add_target(app, options);
  add(app, "--budget", "BYTES", "Say whether the plan fits, and what would (80GiB, 64GB, ...)",
      [&](const std::string& text) { options.budget_bytes = parse_bytes("--budget", text); });
  add(app, "--svg", "FILE", "Draw the regions to scale, and bytes against tokens",
      [&](const std::string& text) { options.svg = text; });
  app.add_flag("--json", options.json, "Print one JSON object on stdout and nothing else");
}

PlanRequest request_of(const PlanOptions& options) {
  PlanRequest request{"", options.config};
  request.title = apply_shape(options.shape, request.config);
  if (options.layers) request.config.max_moe_layers_per_activation_slot = *options.layers;
  return request;
}

std::int64_t parse_bytes(std::string_view option, std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 10> kUnits = {{
      {"KiB", 0x1p10},
      {"MiB", 0x1p20},
      {"GiB", 0x1p30},
      {"TiB", 0x1p40},
      {"PiB", 0x1p50},
      {"KB", 1e3},
      {"MB", 1e6},
      {"GB", 1e9},
      {"TB", 1e12},
      {"PB", 1e15},
  }};
  for (const auto& [unit, size] : kUnits) {
    if (!text.ends_with(unit)) continue;
    std::string_view number = text.substr(0, text.size() - unit.size());
    while (number.ends_with(' ')) number.remove_suffix(1);
    const double bytes = parse_real(option, number, Zero::kLegal) * size;
    DISTMOE_CHECK(bytes < 0x1p63, kInvalidArgument, option, " is '", text,
                  "'; it does not fit in 64 bits");
    return static_cast<std::int64_t>(bytes);
  }
  const bool is_number =
      !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  DISTMOE_CHECK(
      is_number, kInvalidArgument, option, " is '", text,
      "'; legal: bytes >= 0, or a number with KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB");
  return parse_integer(option, text, 0, kMaxSize);
}

}  // namespace distmoe::tools
