// SPDX-License-Identifier: Apache-2.0
#include "shape_options.hpp"

#include <CLI/CLI.hpp>
#include <limits>

#include "core/check.hpp"
#include "io/model_config.hpp"
#include "option_declaration.hpp"
#include "plan/model_table.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxCount = std::numeric_limits<std::int32_t>::max();

void set_if_given(std::int64_t& size, const std::optional<std::int64_t>& given) {
  if (given) size = *given;
}

void check_given(const char* option, std::int64_t size) {
  DISTMOE_CHECK(size > 0, kInvalidArgument, option,
                " is missing; give it, or --model NAME or --checkpoint DIR");
}

}  // namespace

void add_shape_options(CLI::App& app, ShapeOptions& options) {
  add(app, "--model", "NAME", "Shape of a public model, e.g. DeepSeek-V3",
      [&](const std::string& text) { options.model = find_model(text).name; });
  add(app, "--checkpoint", "DIR", "Shape from the config.json of a Hugging Face folder",
      [&](const std::string& text) { options.checkpoint = text; })
      ->excludes("--model");
  add_count(app, "--hidden", "Hidden width (D)", kMaxSize,
            [&](std::int64_t value) { options.hidden_dim = value; });
  add_count(app, "--intermediate", "Intermediate width of one expert (F)", kMaxSize,
            [&](std::int64_t value) { options.intermediate_dim = value; });
  add_count(app, "--top-k", "Experts of a token (K)", kMaxSize,
            [&](std::int64_t value) { options.top_k = value; });
  add_count(app, "--experts", "Experts over all ranks (E)", kMaxCount,
            [&](std::int64_t value) { options.num_experts = value; });
}

std::string apply_shape(const ShapeOptions& options, Config& config) {
  std::string title;
  config.max_moe_layers_per_activation_slot = 1;
  if (!options.model.empty()) {
    const ModelShape& model = find_model(options.model);
    title = model.name;
    config.hidden_dim = model.hidden_dim;
    config.intermediate_dim = model.intermediate_dim;
    config.top_k = model.top_k;
    config.num_experts = model.num_experts;
    config.max_moe_layers_per_activation_slot = model.num_moe_layers;
  } else if (!options.checkpoint.empty()) {
    const ModelConfig model = read_model_config(options.checkpoint / "config.json");
    title = model.architecture;
    config.hidden_dim = model.shape.hidden_dim;
    config.intermediate_dim = model.shape.intermediate_dim;
    config.top_k = model.shape.top_k;
    config.num_experts = model.shape.num_experts;
    config.activation = model.shape.activation;
    config.max_moe_layers_per_activation_slot = std::ssize(model.moe_layers);
  }
  set_if_given(config.hidden_dim, options.hidden_dim);
  set_if_given(config.intermediate_dim, options.intermediate_dim);
  set_if_given(config.top_k, options.top_k);
  set_if_given(config.num_experts, options.num_experts);
  check_given("--hidden", config.hidden_dim);
  check_given("--intermediate", config.intermediate_dim);
  check_given("--top-k", config.top_k);
  check_given("--experts", config.num_experts);
  return title;
}

}  // namespace distmoe::tools
