// SPDX-License-Identifier: Apache-2.0
#include "train_options.hpp"

#include <CLI/CLI.hpp>
#include <functional>
#include <utility>

#include "option_values.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxLayers = 1024;
constexpr std::int64_t kMaxSlots = 1024;
constexpr std::int64_t kMaxMicrobatches = 10000;

using Reader = std::function<void(const std::string& option, const std::string& text)>;

/// An option that only makes sense with --train.
void add(CLI::App& app, TrainOptions& options, const std::string& name, const char* type,
         const char* help, const Reader& read) {
  const auto note = [&options, name, read](const std::string& text) {
    if (options.first_given.empty()) options.first_given = name;
    read(name, text);
  };
  app.add_option_function<std::string>(name, note, help)->type_name(type);
}

void add_count(CLI::App& app, TrainOptions& options, const std::string& name, const char* help,
               std::int64_t most, std::int64_t& value) {
  add(app, options, name, "N", help,
      [most, &value](const std::string& option, const std::string& text) {
        value = parse_integer(option, text, 1, most);
      });
}

}  // namespace

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_flag("--train", options.is_on,
               "Run forward and backward; dy is layerN.dy of the input, or pseudo-random. --output "
               "then also has dy and every gradient");
  add(app, options, "--wgrad-dtype", "none|bf16|fp32",
      "Type of the weight gradients [none: that of the weights]",
      [&](const std::string& option, const std::string& text) {
        options.wgrad_dtype =
            static_cast<WgradDType>(parse_name(option, text, {"none", "bf16", "fp32"}));
      });
  app.add_flag_callback(
      "--accumulate",
      [&] {
        options.accumulates = true;
        if (options.first_given.empty()) options.first_given = "--accumulate";
      },
      "Add up the weight gradients of all backwards of a run");
  add(app, options, "--activation-policy", "full|lean", "What a saving forward keeps [full]",
      [&](const std::string& option, const std::string& text) {
        options.activation_policy =
            static_cast<ActivationPolicy>(parse_name(option, text, {"full", "lean"}));
      });
  add_count(app, options, "--layers-per-slot",
            "Forwards of a microbatch, each a layer of its activation slot [1]", kMaxLayers,
            options.layers_per_slot);
  add_count(app, options, "--slots", "Activation slots, which microbatches take in turn [1]",
            kMaxSlots, options.num_slots);
  add(app, options, "--slot-factor", "Q",
      "Slot from the minimum (0) to saving balanced routing (1) [the minimum]",
      [&](const std::string& option, const std::string& text) {
        options.slot_factor = parse_real(option, text, Zero::kLegal);
      });
  add_count(
      app, options, "--microbatches",
      "Microbatches of a run; one needs its slot free, so that an earlier one goes back first "
      "[1]",
      kMaxMicrobatches, options.num_microbatches);
  add(app, options, "--rmsnorm", "EPS",
      "Post-expert RMSNorm of every route's result; y is then not compared with y_ref [none]",
      [&](const std::string& option, const std::string& text) {
        options.norm_eps = parse_real(option, text, Zero::kIllegal);
      });
  add(app, options, "--clip-limit", "X",
      "Report how many gate and up activations exceed X [not counted]",
      [&](const std::string& option, const std::string& text) {
        options.clip_limit = parse_finite(option, text);
      });
}

void TrainOptions::configure(Config& config) const {
  if (!is_on) return;
  config.inference = false;
  config.activation_policy = activation_policy;
  config.max_moe_layers_per_activation_slot = layers_per_slot;
  config.num_activation_slots = num_slots;
  config.activation_slot_capacity_factor = slot_factor;
  config.wgrad_dtype = wgrad_dtype;
}

}  // namespace distmoe::tools
