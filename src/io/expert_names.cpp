// SPDX-License-Identifier: Apache-2.0
#include "io/expert_names.hpp"

#include <array>
#include <charconv>

#include "core/check.hpp"

namespace distmoe {
namespace {

constexpr std::string_view kLayersPrefix = "model.layers.";

constexpr std::array<Spelling, 4> kOutputMajorSpellings = {{
    {ExpertLayout::kPerExpert, "mlp", "gate_proj.weight", "up_proj.weight", "", "down_proj.weight"},
    {ExpertLayout::kPerExpert, "block_sparse_moe", "w1.weight", "w3.weight", "", "w2.weight"},
    {ExpertLayout::kFused, "mlp", "", "", "gate_up_proj", "down_proj"},
    {ExpertLayout::kFused, "block_sparse_moe", "", "", "gate_up_proj", "down_proj"},
}};

constexpr std::array<Spelling, 2> kGptOssSpellings = {{
    {ExpertLayout::kFusedGptOss, "mlp", "", "", "gate_up_proj", "down_proj"},
    {ExpertLayout::kMxfp4GptOss, "mlp", "", "", "gate_up_proj_blocks", "down_proj_blocks"},
}};

/// Cuts what stands before the first dot off `name`, with the dot.
std::string_view take_component(std::string_view& name) {
  const std::size_t dot = name.find('.');
  const std::string_view component = name.substr(0, dot);
  name.remove_prefix(dot == std::string_view::npos ? name.size() : dot + 1);
  return component;
}

/// Empty for whatever is not written as to_string(number) writes it: "01", "+1", "".
std::optional<std::int64_t> parse_canonical(std::string_view digits) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool is_canonical = error == std::errc() && end == digits.data() + digits.size() &&
                            number >= 0 && (digits.front() != '0' || digits.size() == 1);
  return is_canonical ? std::optional(number) : std::nullopt;
}

}  // namespace

std::span<const Spelling> spellings_of(ExpertFamily family) {
  if (family == ExpertFamily::kGptOss) return kGptOssSpellings;
  return kOutputMajorSpellings;
}

std::string layer_prefix(std::int64_t layer) { return concat(kLayersPrefix, layer, '.'); }

std::string per_expert_name(const Spelling& spelling, std::int64_t layer, std::int64_t expert,
                            std::string_view suffix) {
  return concat(layer_prefix(layer), spelling.block, ".experts.", expert, '.', suffix);
}

std::string fused_name(const Spelling& spelling, std::int64_t layer, std::string_view suffix) {
  return concat(layer_prefix(layer), spelling.block, ".experts.", suffix);
}

bool is_spelled(const Spelling& spelling, std::string_view name_in_layer) {
  if (take_component(name_in_layer) != spelling.block) return false;
  if (take_component(name_in_layer) != "experts") return false;
  if (spelling.layout != ExpertLayout::kPerExpert) {
    return name_in_layer == spelling.gate_up || name_in_layer == spelling.down;
  }
  if (!parse_canonical(take_component(name_in_layer))) return false;
  return name_in_layer == spelling.gate || name_in_layer == spelling.up ||
         name_in_layer == spelling.down;
}

bool is_expert_like(std::string_view name) {
  while (!name.empty()) {
    const std::string_view component = take_component(name);
    if (component.find("shared_expert") != std::string_view::npos) continue;
    if (component.find("expert") != std::string_view::npos) return true;
  }
  return false;
}

std::optional<std::int64_t> layer_of(std::string_view name) {
  if (!name.starts_with(kLayersPrefix)) return std::nullopt;
  name.remove_prefix(kLayersPrefix.size());
  return parse_canonical(take_component(name));
}

}  // namespace distmoe
