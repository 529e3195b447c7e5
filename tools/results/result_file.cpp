// SPDX-License-Identifier: Apache-2.0
#include "results/result_file.hpp"

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/check.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::json;

/// Reads values of one line; what is missing or of another type is refused by name.
class LineReader {
 public:
  LineReader(const Json& object, std::string place) : object_(object), place_(std::move(place)) {}

  template <typename Value>
  Value get(const char* key) const {
    DISTMOE_CHECK(object_.contains(key), kInvalidArgument, place_, ": there is no \"", key,
                  "\"; legal: lines of this version's 'distmoe bench --json'");
    try {
      return object_[key].get<Value>();
    } catch (const Json::exception&) {
      throw_error(ErrorCode::kInvalidArgument,
                  concat(place_, ": \"", key, "\" is ", object_[key].dump()));
    }
  }
  std::optional<double> optional(const char* key) const {
    const Json value = get<Json>(key);
    return value.is_null() ? std::nullopt : std::optional(get<double>(key));
  }
  std::string text_or_empty(const char* key) const {
    return get<Json>(key).is_null() ? std::string() : get<std::string>(key);
  }
  /// One for every element of an array, or of an object by its key.
  template <typename Read>
  void for_each(const char* key, const Read& read) const {
    const Json values = get<Json>(key);
    for (const auto& [name, value] : values.items()) {
      read(name, LineReader(value, concat(place_, ", \"", key, "\"")));
    }
  }
  double number() const {
    DISTMOE_CHECK(object_.is_number(), kInvalidArgument, place_, ": ", object_.dump(),
                  " is no number");
    return object_.get<double>();
  }

 private:
  const Json object_;
  std::string place_;
};

void read_call(const LineReader& line, ResultRow& row) {
  row.shape = line.get<std::string>("shape");
  row.hidden_dim = line.get<std::int64_t>("hidden_dim");
  row.top_k = line.get<std::int64_t>("top_k");
  row.experts = line.get<std::int64_t>("experts");
  row.mode = line.get<std::string>("mode");
  row.backend = line.get<std::string>("backend");
  row.engine = line.get<std::string>("engine");
  row.routing = line.get<std::string>("routing");
  row.precision = line.get<std::string>("precision");
  row.combine = line.get<std::string>("combine");
  row.tokens = line.get<std::int64_t>("tokens");
  row.ranks = line.get<std::int64_t>("ranks");
  row.is_graph = line.get<bool>("graph");
  if (line.text_or_empty("activation_policy") == "lean") row.variant = "lean";
  const Json recompute = line.get<Json>("recompute");
  if (recompute == true) row.variant += row.variant.empty() ? "recompute" : ", recompute";
  row.machine = line.get<std::string>("machine");
  row.torch = line.text_or_empty("torch");
  row.version = line.get<std::string>("version");
  row.date = line.get<std::string>("date");
  row.command = line.get<std::string>("command");
  row.missing = line.get<std::vector<std::string>>("missing");
}

void read_times(const LineReader& line, ResultRow& row) {
  row.median_us = line.get<double>("median_us");
  row.spread = line.get<double>("spread");
  row.is_unstable = line.get<bool>("unstable");
  row.tflops = line.optional("tflops");
  row.floor_us = line.optional("floor_us");
  row.efficiency = line.optional("efficiency");
  row.bound_us = line.optional("bound_us");
  row.bound_ratio = line.optional("bound_ratio");
  row.forward_us = line.optional("forward_us");
  row.backward_us = line.optional("backward_us");
  row.flops = line.get<double>("flops");
  row.weight_bytes = line.get<double>("weight_bytes");
  row.dense_tflops = line.optional("dense_tflops");
  row.copy_tb_s = line.optional("copy_tb_s");
  row.read_tb_s = line.optional("read_tb_s");
  row.link_gb_s = line.optional("link_gb_s");
  row.overhead_us = line.get<double>("overhead_us");
  row.rel_l2 = line.get<double>("rel_l2");
  row.is_repeatable = line.get<bool>("repeat_bitwise_equal");
  line.for_each("steps", [&](const std::string&, const LineReader& step) {
    row.steps.push_back({step.get<std::string>("name"), step.get<double>("us")});
  });
  line.for_each("peers", [&](const std::string&, const LineReader& peer) {
    row.peers.push_back({peer.get<std::string>("name"), peer.get<double>("median_us"),
                         peer.get<double>("ratio"), peer.get<bool>("unstable")});
  });
  line.for_each("plan_bytes", [&](const std::string& name, const LineReader& bytes) {
    if (name != "allocated") row.plan_bytes.push_back({name, bytes.number()});
  });
}

}  // namespace

std::string ResultRow::call() const {
  std::string text = mode;
  if (precision != "bf16") text += ", " + precision;
  if (!variant.empty()) text += ", " + variant;
  if (combine != "per_route") text += ", " + combine;
  if (is_graph) text += ", CUDA graph";
  if (routing != "uniform") text += ", " + routing;
  return text;
}

namespace {

/// Axes are logarithmic: a rate is more than 0, or absent.
void check_rates(const ResultRow& row, const std::string& place) {
  const auto check = [&](const char* name, const std::optional<double>& rate) {
    DISTMOE_CHECK(!rate || (*rate > 0.0 && std::isfinite(*rate)), kInvalidArgument, place, ": ",
                  name, " is ", *rate, "; legal: null or more than 0");
  };
  check("tflops", row.tflops);
  check("bound_us", row.bound_us);
  check("bound_ratio", row.bound_ratio);
  check("dense_tflops", row.dense_tflops);
  check("copy_tb_s", row.copy_tb_s);
  check("read_tb_s", row.read_tb_s);
  check("link_gb_s", row.link_gb_s);
  if (row.tflops) check("flops", row.flops);
}

}  // namespace

std::vector<ResultRow> parse_results(std::string_view text, const std::string& source) {
  std::vector<ResultRow> rows;
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view words = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (words.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place = concat(source, " line ", number);
    const Json object = Json::parse(words, nullptr, false);
    DISTMOE_CHECK(object.is_object(), kInvalidArgument, place,
                  " is not one JSON object; legal: lines of 'distmoe bench --json'");
    const LineReader line(object, place);
    ResultRow& row = rows.emplace_back();
    read_call(line, row);
    read_times(line, row);
    DISTMOE_CHECK(row.median_us > 0.0 && row.tokens > 0 && row.ranks > 0, kInvalidArgument, place,
                  ": median_us is ", row.median_us, ", tokens ", row.tokens, ", ranks ", row.ranks,
                  "; legal: all more than 0");
    check_rates(row, place);
  }
  return rows;
}

std::vector<ResultRow> read_results(std::span<const std::filesystem::path> files) {
  std::vector<ResultRow> all;
  for (const std::filesystem::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    DISTMOE_CHECK(file.good() || file.eof(), kIo, "cannot read ", path);
    for (ResultRow& row : parse_results(text, path.string())) all.push_back(std::move(row));
  }
  DISTMOE_CHECK(!all.empty(), kInvalidArgument,
                "there is no result in the given files; legal: lines of 'distmoe bench --json'");
  return all;
}

}  // namespace distmoe::tools
