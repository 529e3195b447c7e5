// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_shape.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>

#include "core/check.hpp"
#include "option_values.hpp"
#include "plan/model_table.hpp"

namespace distmoe::tools {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

// A rank of a large group owns 32 of DeepSeek-V3's 256 experts.
constexpr std::array kPublished = {"Mixtral-8x7B", "DeepSeek-V3@32", "Qwen3-235B-A22B",
                                   "gpt-oss-120b", "Qwen3-30B-A3B",  "OLMoE-1B-7B"};

BenchShape shape_of_model(std::string_view name) {
  const ModelShape& model = find_model(name);
  return {.name = std::string(model.name),
          .hidden_dim = model.hidden_dim,
          .intermediate_dim = model.intermediate_dim,
          .top_k = model.top_k,
          .num_experts = model.num_experts};
}

BenchShape shape_of_numbers(std::string_view text) {
  std::array<std::int64_t, 4> sizes{};
  DISTMOE_CHECK(std::ranges::count(text, ',') == std::ssize(sizes) - 1, kInvalidArgument,
                "--shape is '", text, "'; legal: a model, or four numbers D,F,E,K");
  std::string_view rest = text;
  for (std::int64_t& size : sizes) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    size = parse_integer("--shape", rest.substr(0, comma), 1, kMaxSize);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return {.name = std::string(text),
          .hidden_dim = sizes[0],
          .intermediate_dim = sizes[1],
          .top_k = sizes[3],
          .num_experts = sizes[2]};
}

BenchShape parse_shape(std::string_view text) {
  const std::size_t at = std::min(text.find('@'), text.size());
  const std::string_view base = text.substr(0, at);
  BenchShape shape =
      base.find(',') == std::string_view::npos ? shape_of_model(base) : shape_of_numbers(base);
  if (at == text.size()) return shape;
  shape.num_experts = parse_integer("--shape: experts per rank", text.substr(at + 1), 1, kMaxSize);
  shape.are_experts_per_rank = true;
  shape.name += text.substr(at);
  return shape;
}

}  // namespace

std::vector<BenchShape> parse_bench_shapes(std::string_view text) {
  if (text != "each") return {parse_shape(text)};
  std::vector<BenchShape> shapes;
  shapes.reserve(kPublished.size());
  for (const char* published : kPublished) shapes.push_back(parse_shape(published));
  return shapes;
}

}  // namespace distmoe::tools
