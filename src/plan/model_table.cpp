// SPDX-License-Identifier: Apache-2.0
#include "plan/model_table.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <vector>

#include "core/check.hpp"

namespace distmoe {
namespace {

// Layers that are dense throughout (the first ones of DeepSeek-V3, Kimi-K2, GLM-4.5) do not count.
constexpr std::array kModels = {
    //          name                D     F      K  E    layers
    ModelShape{"Mixtral-8x7B", 4096, 14336, 2, 8, 32},
    ModelShape{"Mixtral-8x22B", 6144, 16384, 2, 8, 56},
    ModelShape{"Qwen3-30B-A3B", 2048, 768, 8, 128, 48},
    ModelShape{"Qwen3-235B-A22B", 4096, 1536, 8, 128, 94},
    ModelShape{"DeepSeek-V3", 7168, 2048, 8, 256, 58},
    ModelShape{"Kimi-K2", 7168, 2048, 8, 384, 60},
    ModelShape{"GLM-4.5", 5120, 1536, 8, 160, 89},
    ModelShape{"OLMoE-1B-7B", 2048, 1024, 8, 64, 16},
    ModelShape{"gpt-oss-20b", 2880, 2880, 4, 32, 24},
    ModelShape{"gpt-oss-120b", 2880, 2880, 4, 128, 36},
    ModelShape{"Llama-4-Scout", 5120, 8192, 1, 16, 48},
    ModelShape{"Phi-3.5-MoE", 4096, 6400, 2, 16, 32},
    ModelShape{"DBRX", 6144, 10752, 4, 16, 40},
    ModelShape{"Granite-3.0-3B-A800M", 1536, 512, 8, 40, 32},
};

std::string lower_case(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return lower;
}

template <typename Models>
std::string names_of(const Models& models) {
  std::string names;
  for (const ModelShape& model : models) {
    if (!names.empty()) names += ", ";
    names += model.name;
  }
  return names;
}

}  // namespace

std::span<const ModelShape> model_table() { return kModels; }

const ModelShape& find_model(std::string_view name) {
  const std::string wanted = lower_case(name);
  std::vector<std::reference_wrapper<const ModelShape>> matches;
  for (const ModelShape& model : kModels) {
    const std::string candidate = lower_case(model.name);
    if (candidate == wanted) return model;
    if (!wanted.empty() && candidate.find(wanted) != std::string::npos) matches.emplace_back(model);
  }
  DISTMOE_CHECK(!matches.empty(), kInvalidArgument, "model '", name, "' is not known; known are ",
                names_of(kModels));
  DISTMOE_CHECK(matches.size() == 1, kInvalidArgument, "model '", name,
                "' fits several models: ", names_of(matches));
  return matches.front();
}

}  // namespace distmoe
