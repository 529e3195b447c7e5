// SPDX-License-Identifier: Apache-2.0
#include "io/model_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "core/check.hpp"
#include "formats/block_format.hpp"
#include "formats/fp8_blocks.hpp"
#include "io/mapped_file.hpp"
#include "io/quote.hpp"

namespace distmoe {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 4 << 20;
constexpr int kMaxConfigDepth = 32;
constexpr std::int64_t kMaxLayers = 1 << 14;
constexpr std::int64_t kMaxExperts = 1 << 16;
constexpr std::int64_t kMaxWidth = 1 << 24;

struct Architecture {
  std::string_view name;
  ExpertFamily family;
  const char* intermediate_key;
};

constexpr std::array<Architecture, 5> kArchitectures = {{
    {"MixtralForCausalLM", ExpertFamily::kOutputMajor, "intermediate_size"},
    {"Qwen3MoeForCausalLM", ExpertFamily::kOutputMajor, "moe_intermediate_size"},
    {"OlmoeForCausalLM", ExpertFamily::kOutputMajor, "intermediate_size"},
    {"DeepseekV3ForCausalLM", ExpertFamily::kOutputMajor, "moe_intermediate_size"},
    {"GptOssForCausalLM", ExpertFamily::kGptOss, "intermediate_size"},
}};

Json parse_config(const std::filesystem::path& path) {
  const MappedFile file = MappedFile::open(path);
  DISTMOE_CHECK(file.bytes().size() <= kMaxConfigBytes, kIo, path.string(), " has ",
                file.bytes().size(), " bytes; at most ", kMaxConfigBytes, " are read");
  const auto* text = reinterpret_cast<const char*>(file.bytes().data());
  const auto check_depth = [&](int depth, Json::parse_event_t, Json&) {
    DISTMOE_CHECK(depth <= kMaxConfigDepth, kIo, path.string(), " nests deeper than ",
                  kMaxConfigDepth, " levels");
    return true;
  };
  try {
    Json config = Json::parse(text, text + file.bytes().size(), check_depth);
    DISTMOE_CHECK(config.is_object(), kIo, path.string(), " is not a JSON object");
    return config;
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::kIo, concat(path.string(), " is not valid JSON: ", error.what()));
  }
}

/// Reads values of one config.json; errors name the file and the key.
class ConfigReader {
 public:
  explicit ConfigReader(const std::filesystem::path& path)
      : path_(path.string()), config_(parse_config(path)) {}

  const std::string& path() const { return path_; }

  /// Null where the key is missing or null.
  const Json* find(const char* key) const {
    const auto place = config_.find(key);
    return place == config_.end() || place->is_null() ? nullptr : &*place;
  }

  std::optional<std::int64_t> find_integer(const char* key, std::int64_t low,
                                           std::int64_t high) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    return checked_integer(*value, key, low, high);
  }

  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high) const {
    const std::optional<std::int64_t> value = find_integer(key, low, high);
    DISTMOE_CHECK(value, kIo, path_, " lacks ", key);
    return *value;
  }

  /// The value of whichever of the synonyms are given; they must agree.
  std::int64_t integer_of(std::initializer_list<const char*> synonyms, std::int64_t high) const {
    std::optional<std::int64_t> result;
    for (const char* key : synonyms) {
      const std::optional<std::int64_t> value = find_integer(key, 1, high);
      DISTMOE_CHECK(!value || !result || *value == *result, kIo, path_, " has ", key, " = ",
                    value.value_or(0), ", but ", result.value_or(0), " under another name");
      if (value) result = value;
    }
    DISTMOE_CHECK(result, kIo, path_, " lacks ", *synonyms.begin());
    return *result;
  }

  double positive_number(const char* key, double fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    const double number = value->is_number() ? value->get<double>() : NAN;
    DISTMOE_CHECK(std::isfinite(number) && number > 0, kIo, path_, " has ", key, " = ",
                  quote(value->dump()), "; legal are finite numbers above 0");
    return number;
  }

  std::vector<std::int64_t> integers(const char* key, std::int64_t low, std::int64_t high) const {
    std::vector<std::int64_t> result;
    const Json* values = find(key);
    if (values == nullptr) return result;
    DISTMOE_CHECK(values->is_array(), kIo, path_, " has ", key, " that is no list");
    for (const Json& value : *values) result.push_back(checked_integer(value, key, low, high));
    return result;
  }

 private:
  std::int64_t checked_integer(const Json& value, const char* key, std::int64_t low,
                               std::int64_t high) const {
    const bool fits = value.is_number_integer() &&
                      !(value.is_number_unsigned() && value.get<std::uint64_t>() > kMaxInteger);
    const std::int64_t number = fits ? value.get<std::int64_t>() : low - 1;
    DISTMOE_CHECK(number >= low && number <= high, kIo, path_, " has ", key, " = ",
                  quote(value.dump()), "; legal are integers from ", low, " to ", high);
    return number;
  }

  static constexpr std::uint64_t kMaxInteger = INT64_MAX;
  std::string path_;
  Json config_;
};

const Architecture& read_architecture(const ConfigReader& config) {
  const Json* names = config.find("architectures");
  DISTMOE_CHECK(names != nullptr && names->is_array() && !names->empty() && (*names)[0].is_string(),
                kIo, config.path(),
                " lacks architectures, a list with the name of the model class");
  const auto name = (*names)[0].get<std::string>();
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) return architecture;
    known += concat(known.empty() ? "" : ", ", architecture.name);
  }
  throw_error(ErrorCode::kUnsupported,
              concat(config.path(), " is of architecture ", quote(name), "; known are ", known));
}

void check_activation(const ConfigReader& config) {
  const Json* activation = config.find("hidden_act");
  DISTMOE_CHECK(activation == nullptr || *activation == "silu", kUnsupported, config.path(),
                " has hidden_act = ", quote(activation->dump()),
                "; routed experts are SwiGLU, hidden_act \"silu\"");
}

StoredFormat read_modelopt_format(const ConfigReader& config, const Json& quantization) {
  const Json algorithm = quantization.value("quant_algo", Json());
  DISTMOE_CHECK(algorithm == "NVFP4" || algorithm == "MXFP8", kUnsupported, config.path(),
                " has quant_algo ", quote(algorithm.dump()), "; known are \"NVFP4\" and \"MXFP8\"");
  const StoredFormat format = algorithm == "NVFP4" ? StoredFormat::kNvfp4 : StoredFormat::kMxfp8;
  const Json legal = block_format_of(precision_of(format)).block_size;
  const Json group = quantization.value("group_size", legal);
  DISTMOE_CHECK(group == legal, kUnsupported, config.path(), " has group_size ",
                quote(group.dump()), "; ", algorithm.get<std::string>(), " has blocks of ",
                legal.dump());
  return format;
}

StoredFormat read_coded_format(const ConfigReader& config) {
  const Json* quantization = config.find("quantization_config");
  if (quantization == nullptr) return StoredFormat::kFp8Blocks;
  DISTMOE_CHECK(quantization->is_object(), kIo, config.path(),
                " has a quantization_config that is no object");
  const Json method = quantization->value("quant_method", Json());
  if (method == "modelopt") return read_modelopt_format(config, *quantization);
  DISTMOE_CHECK(method == "fp8" || method == "mxfp4", kUnsupported, config.path(),
                " has quant_method ", quote(method.dump()),
                "; known are \"fp8\", \"mxfp4\" and \"modelopt\"");
  const Json legal = {kFp8BlockSize, kFp8BlockSize};
  const Json block = quantization->value("weight_block_size", method == "fp8" ? Json() : legal);
  DISTMOE_CHECK(block == legal, kUnsupported, config.path(), " has weight_block_size ",
                quote(block.dump()), "; FP8 weights need [128, 128]");
  return method == "mxfp4" ? StoredFormat::kMxfp4 : StoredFormat::kFp8Blocks;
}

LayerShape read_shape(const ConfigReader& config, const Architecture& architecture) {
  LayerShape shape;
  shape.num_experts =
      config.integer_of({"num_experts", "num_local_experts", "n_routed_experts"}, kMaxExperts);
  shape.top_k = config.integer("num_experts_per_tok", 1, shape.num_experts);
  shape.hidden_dim = config.integer("hidden_size", 1, kMaxWidth);
  shape.intermediate_dim = config.integer(architecture.intermediate_key, 1, kMaxWidth);
  if (architecture.family == ExpertFamily::kGptOss) {
    shape.activation = Activation::kSwiGLUClamped;
    shape.swiglu_alpha = config.positive_number("swiglu_alpha", shape.swiglu_alpha);
    shape.swiglu_limit = config.positive_number("swiglu_limit", shape.swiglu_limit);
    shape.has_bias = true;
  }
  return shape;
}

/// A key of another architecture changes nothing: its meaning would be a guess.
void read_layers(const ConfigReader& config, ModelConfig& model) {
  const std::int64_t num_layers = config.integer("num_hidden_layers", 1, kMaxLayers);
  const bool is_qwen = model.architecture == "Qwen3MoeForCausalLM";
  const bool is_deepseek = model.architecture == "DeepseekV3ForCausalLM";

  std::int64_t first = 0;
  std::int64_t step = 1;
  std::vector<std::int64_t> dense_layers;
  if (is_qwen) {
    step = config.find_integer("decoder_sparse_step", 1, kMaxLayers).value_or(1);
    dense_layers = config.integers("mlp_only_layers", 0, kMaxLayers);
  }
  if (is_deepseek) {
    first = config.find_integer("first_k_dense_replace", 0, kMaxLayers).value_or(0);
    step = config.find_integer("moe_layer_freq", 1, kMaxLayers).value_or(1);
  }
  const std::int64_t phase = is_qwen ? 1 : 0;  // Qwen counts layers from 1
  for (std::int64_t layer = first; layer < num_layers; ++layer) {
    const bool is_dense =
        std::find(dense_layers.begin(), dense_layers.end(), layer) != dense_layers.end();
    if ((layer + phase) % step == 0 && !is_dense) model.moe_layers.push_back(layer);
  }
  if (!is_deepseek) return;
  const std::int64_t num_extra =
      config.find_integer("num_nextn_predict_layers", 0, kMaxLayers).value_or(0);
  for (std::int64_t layer = num_layers; layer < num_layers + num_extra; ++layer) {
    model.optional_moe_layers.push_back(layer);
  }
}

}  // namespace

ModelConfig read_model_config(const std::filesystem::path& path) {
  const ConfigReader config(path);
  const Architecture& architecture = read_architecture(config);
  check_activation(config);
  ModelConfig model;
  model.coded_format = read_coded_format(config);
  model.architecture = architecture.name;
  model.family = architecture.family;
  model.shape = read_shape(config, architecture);
  read_layers(config, model);
  return model;
}

}  // namespace distmoe
