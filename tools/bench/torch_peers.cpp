// SPDX-License-Identifier: Apache-2.0
#include "bench/torch_peers.hpp"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "bench/torch_peers_script.hpp"
#include "core/check.hpp"
#include "run_options.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::json;

/// Sets of tokens that a layer takes in turn.
constexpr std::size_t kSets = 2;

Json parse_answer(const std::string& line) {
  const Json answer = Json::parse(line, nullptr, false);
  DISTMOE_CHECK(answer.is_object(), kUnsupported, "PyTorch answered ", line);
  DISTMOE_CHECK(!answer.contains("error"), kUnsupported, answer["error"].get<std::string>());
  return answer;
}

}  // namespace

TorchPeers::TorchPeers(const std::string& python, BackendKind backend, int num_threads,
                       std::chrono::milliseconds timeout)
    : timeout_(timeout) {
  const std::string where = backend == BackendKind::kCpu ? std::to_string(num_threads) : "0";
  process_ = std::make_unique<ChildProcess>(
      std::vector<std::string>{python, "-c", kTorchPeersScript, to_string(backend), where},
      std::vector<std::string>{}, ChildInput::kPipe);
  const Json hello = parse_answer(ask(""));
  version_ = "PyTorch " + hello["version"].get<std::string>();
  variants_ = hello["variants"].get<std::vector<std::string>>();
  for (const std::string& variant : variants_) names_.push_back("torch " + variant);
}

std::string TorchPeers::ask(const std::string& request) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  try {
    if (!request.empty()) process_->write_line(request, deadline);
    return process_->read_line("{", deadline);
  } catch (const Error& error) {
    if (std::chrono::steady_clock::now() < deadline) throw;
    throw_error(error.code(), concat(error.what(), " (--timeout is ",
                                     static_cast<double>(timeout_.count()) * 1e-3, " s)"));
  }
}

void TorchPeers::add_layer(std::size_t row, const BenchCase& plan, bool trains) {
  Json routes = Json::array();
  for (std::size_t set = 0; set < std::min(plan.sets.size(), kSets); ++set) {
    const RoutedTokens& tokens = plan.sets[set];
    DISTMOE_CHECK(std::ranges::all_of(tokens.ids, [](std::int32_t id) { return id >= 0; }),
                  kUnsupported, "its layers here know no disabled route");
    routes.push_back({{"ids", tokens.ids}, {"scores", tokens.scores}});
  }
  const BenchShape& shape = plan.shape;
  parse_answer(ask(Json{
      {"do", "layer"},
      {"row", row},
      {"shape", {shape.hidden_dim, shape.intermediate_dim, plan.config.num_experts, shape.top_k}},
      {"tokens", plan.num_tokens},
      {"routes", routes},
      {"trains",
       trains}}.dump()));
}

double TorchPeers::time(std::size_t row, std::size_t name) {
  return parse_answer(
             ask(Json{{"do", "time"}, {"row", row}, {"variant", variants_[name]}}.dump()))["us"]
      .get<double>();
}

}  // namespace distmoe::tools
