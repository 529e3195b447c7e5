// SPDX-License-Identifier: Apache-2.0
#include "results/result_file.hpp"

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
  template <typename Value>
  void read(const char* key, Value& value) const {
    value = get<Value>(key);
  }
  /// Null: empty.
  template <typename Value>
  void read(const char* key, std::optional<Value>& value) const {
    if (!get<Json>(key).is_null()) value = get<Value>(key);
  }
  /// Axes are logarithmic: a rate is more than 0, or null.
  void read_rate(const char* key, std::optional<double>& rate) const {
    read(key, rate);
    DISTMOE_CHECK(!rate || *rate > 0.0, kInvalidArgument, place_, ": ", key, " is ", *rate,
                  "; legal: null or more than 0");
  }
  std::string text_or_empty(const char* key) const {
    std::optional<std::string> text;
    read(key, text);
    return text.value_or("");
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
  line.read("shape", row.shape);
  line.read("hidden_dim", row.hidden_dim);
  line.read("top_k", row.top_k);
  line.read("experts", row.experts);
  line.read("mode", row.mode);
  line.read("backend", row.backend);
  line.read("engine", row.engine);
  line.read("routing", row.routing);
  line.read("precision", row.precision);
  line.read("combine", row.combine);
  line.read("tokens", row.tokens);
  line.read("ranks", row.ranks);
  line.read("graph", row.is_graph);
  if (line.text_or_empty("activation_policy") == "lean") row.variant = "lean";
  if (line.get<Json>("recompute") == true) {
    row.variant += row.variant.empty() ? "recompute" : ", recompute";
  }
  line.read("machine", row.machine);
  row.torch = line.text_or_empty("torch");
  line.read("version", row.version);
  line.read("date", row.date);
  line.read("command", row.command);
  line.read("missing", row.missing);
}

void read_times(const LineReader& line, ResultRow& row) {
  line.read("median_us", row.median_us);
  line.read("spread", row.spread);
  line.read("unstable", row.is_unstable);
  line.read_rate("tflops", row.tflops);
  line.read("floor_us", row.floor_us);
  line.read("efficiency", row.efficiency);
  line.read_rate("bound_us", row.bound_us);
  line.read_rate("bound_ratio", row.bound_ratio);
  line.read("forward_us", row.forward_us);
  line.read("backward_us", row.backward_us);
  line.read("flops", row.flops);
  line.read("weight_bytes", row.weight_bytes);
  line.read_rate("dense_tflops", row.dense_tflops);
  line.read_rate("copy_tb_s", row.copy_tb_s);
  line.read_rate("read_tb_s", row.read_tb_s);
  line.read_rate("write_tb_s", row.write_tb_s);
  line.read_rate("link_gb_s", row.link_gb_s);
  line.read("overhead_us", row.overhead_us);
  line.read("rel_l2", row.rel_l2);
  line.read("tolerance", row.tolerance);
  line.read("repeat_bitwise_equal", row.is_repeatable);
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

void check(const ResultRow& row, const std::string& place) {
  DISTMOE_CHECK(row.median_us > 0.0 && row.tokens > 0 && row.ranks > 0, kInvalidArgument, place,
                ": median_us is ", row.median_us, ", tokens ", row.tokens, ", ranks ", row.ranks,
                "; legal: all more than 0");
  DISTMOE_CHECK(!row.tflops || row.flops > 0.0, kInvalidArgument, place, ": flops is ", row.flops,
                "; legal: more than 0 where tflops is a number");
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
    check(row, place);
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
