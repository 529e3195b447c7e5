// SPDX-License-Identifier: Apache-2.0
#include "io/expert_catalog.hpp"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>

#include "core/check.hpp"
#include "core/checked_math.hpp"
#include "formats/fp8_blocks.hpp"
#include "formats/mxfp4.hpp"
#include "io/expert_names.hpp"
#include "io/quote.hpp"
#include "io/stored_dtype.hpp"

namespace distmoe {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kNoExpert = -1;
/// How many names an error lists.
constexpr std::size_t kMaxListed = 8;

std::string describe_shape(const Shape& shape) {
  std::string text;
  for (const std::int64_t extent : shape) text += concat(text.empty() ? "" : ", ", extent);
  return concat('[', text, ']');
}

class Cataloguer {
 public:
  Cataloguer(const ModelConfig& config, std::span<const SafetensorsFile> shards,
             const std::string& label)
      : config_(config), shape_(config.shape), label_(label) {
    for (const SafetensorsFile& file : shards) {
      for (const StoredTensor& tensor : file.tensors()) {
        if (is_expert_like(tensor.name)) found_.push_back({&tensor, &file});
      }
    }
    std::ranges::sort(found_, {}, name_of);
    is_read_.resize(found_.size(), false);
  }

  std::map<std::int64_t, LayerTensors> take_all() {
    std::map<std::int64_t, LayerTensors> layers;
    for (const std::int64_t layer : config_.moe_layers) layers.emplace(layer, take_layer(layer));
    for (const std::int64_t layer : config_.optional_moe_layers) {
      if (!tensors_of(layer).empty()) layers.emplace(layer, take_layer(layer));
    }
    check_all_found_and_read();
    return layers;
  }

 private:
  LayerTensors take_layer(std::int64_t layer) {
    last_layer_ = layer;
    has_input_scales_.reset();
    const Spelling& spelling = spelling_of(layer);
    LayerTensors tensors;
    tensors.layout = spelling.layout;
    if (spelling.layout == ExpertLayout::kPerExpert) {
      take_per_expert(spelling, layer, tensors);
    } else {
      take_fused(spelling, layer, tensors);
    }
    // One layer's gaps tell enough; a configuration of many absent layers must not cost time.
    if (num_missing_ > 0) check_all_found_and_read();
    return tensors;
  }

  static std::string_view name_of(const TensorRef& ref) { return ref.tensor->name; }

  /// Sorted by name, the tensors of a layer lie side by side.
  std::span<const TensorRef> tensors_of(std::int64_t layer) const {
    const std::string prefix = layer_prefix(layer);
    const auto begin = std::ranges::lower_bound(found_, std::string_view(prefix), {}, name_of);
    const auto end = std::find_if_not(begin, found_.end(), [&](const TensorRef& ref) {
      return name_of(ref).starts_with(prefix);
    });
    return {begin, end};
  }

  /// The spelling that most of the layer's tensors have; what has another is left over.
  const Spelling& spelling_of(std::int64_t layer) const {
    const std::span<const Spelling> spellings = spellings_of(config_.family);
    const Spelling* best = &spellings.front();
    const std::span<const TensorRef> tensors = tensors_of(layer);
    const std::size_t prefix_length = layer_prefix(layer).size();
    std::ptrdiff_t best_count = 0;
    for (const Spelling& spelling : spellings) {
      const auto count = std::ranges::count_if(tensors, [&](const TensorRef& ref) {
        return is_spelled(spelling, name_of(ref).substr(prefix_length));
      });
      if (count > best_count) {
        best = &spelling;
        best_count = count;
      }
    }
    return *best;
  }

  void take_per_expert(const Spelling& spelling, std::int64_t layer, LayerTensors& tensors) {
    const Shape w13 = {shape_.intermediate_dim, shape_.hidden_dim};
    const Shape w2 = {shape_.hidden_dim, shape_.intermediate_dim};
    for (std::int64_t expert = 0; expert < shape_.num_experts; ++expert) {
      const auto take = [&](std::string_view suffix, const Shape& matrix) {
        return take_matrix(per_expert_name(spelling, layer, expert, suffix), expert, matrix);
      };
      PerExpertTensors found;
      found.gate = take(spelling.gate, w13);
      found.up = take(spelling.up, w13);
      found.down = take(spelling.down, w2);
      tensors.experts.push_back(found);
    }
  }

  /// BF16, or in the format of the configuration.
  MatrixRef take_matrix(const std::string& name, std::int64_t expert, const Shape& shape) {
    const TensorRef* there = find(name);
    const bool is_bf16 = there == nullptr || there->tensor->dtype == DType::kBF16;
    MatrixRef matrix;
    matrix.format = is_bf16 ? StoredFormat::kBF16 : config_.coded_format;
    const Shape halves = {shape[0], shape[1] / 2};
    switch (matrix.format) {
      case StoredFormat::kBF16:
        matrix.values = take(name, expert, {DType::kBF16, DType::kF8E4M3}, shape);
        break;
      case StoredFormat::kFp8Blocks:
        matrix.values = take(name, expert, {DType::kBF16, DType::kF8E4M3}, shape);
        matrix.scales =
            take(name + "_scale_inv", expert, {DType::kF32, DType::kBF16},
                 {ceil_div(shape[0], kFp8BlockSize), ceil_div(shape[1], kFp8BlockSize)});
        break;
      case StoredFormat::kMxfp8:
        check_columns(name, shape[1], kMxfp8BlockSize);
        matrix.values = take(name, expert, {DType::kBF16, DType::kF8E4M3}, shape);
        matrix.scales = take(name + "_scale", expert, {DType::kU8, DType::kF8E8M0},
                             {shape[0], shape[1] / kMxfp8BlockSize});
        break;
      case StoredFormat::kMxfp4:
        check_columns(name, shape[1], kMxfp4BlockSize);
        matrix.values = take(name, expert, {DType::kU8}, halves);
        matrix.scales = take(name + "_scale", expert, {DType::kU8, DType::kF8E8M0},
                             {shape[0], shape[1] / kMxfp4BlockSize});
        break;
      case StoredFormat::kNvfp4:
        check_columns(name, shape[1], kNvfp4BlockSize);
        matrix.values = take(name, expert, {DType::kU8}, halves);
        matrix.scales =
            take(name + "_scale", expert, {DType::kF8E4M3}, {shape[0], shape[1] / kNvfp4BlockSize});
        matrix.global_scale = take_scalar(name + "_scale_2", expert);
        take_input_scale(name, expert);
        break;
    }
    return matrix;
  }

  /// One FP32, as [] or [1].
  TensorRef take_scalar(const std::string& name, std::int64_t expert) {
    const TensorRef* there = find(name);
    const bool is_list = there != nullptr && there->tensor->shape == Shape{1};
    return take(name, expert, {DType::kF32}, is_list ? Shape{1} : Shape{});
  }

  /// A calibrated scale of activations, which are quantised by their own amax here. Nothing reads
  /// it, but where one matrix of a layer has it all must: a gap tells of a damaged file.
  void take_input_scale(const std::string& weight_name, std::int64_t expert) {
    const std::string name = weight_name.substr(0, weight_name.rfind('.')) + ".input_scale";
    if (!has_input_scales_) has_input_scales_ = find(name) != nullptr;
    if (*has_input_scales_) take_scalar(name, expert);
  }

  void check_columns(const std::string& name, std::int64_t columns, std::int64_t block) const {
    DISTMOE_CHECK(columns % block == 0, kUnsupported, label_, " has ", quote(name), " with ",
                  columns, " columns in blocks of ", block, "; it must be a multiple");
  }

  void take_fused(const Spelling& spelling, std::int64_t layer, LayerTensors& tensors) {
    const std::int64_t num_experts = shape_.num_experts;
    const std::int64_t d = shape_.hidden_dim;
    const std::int64_t f = shape_.intermediate_dim;
    const auto take_one = [&](std::string_view suffix, DType dtype, const Shape& shape) {
      return take(fused_name(spelling, layer, suffix), kNoExpert, {dtype}, shape);
    };
    if (spelling.layout == ExpertLayout::kMxfp4GptOss) {
      check_mxfp4_dims();
      tensors.gate_up.format = StoredFormat::kMxfp4;
      tensors.down.format = StoredFormat::kMxfp4;
      tensors.gate_up.values =
          take_one(spelling.gate_up, DType::kU8,
                   {num_experts, 2 * f, d / kMxfp4BlockSize, kMxfp4BlockBytes});
      tensors.gate_up.scales =
          take_one("gate_up_proj_scales", DType::kU8, {num_experts, 2 * f, d / kMxfp4BlockSize});
      tensors.down.values = take_one(spelling.down, DType::kU8,
                                     {num_experts, d, f / kMxfp4BlockSize, kMxfp4BlockBytes});
      tensors.down.scales =
          take_one("down_proj_scales", DType::kU8, {num_experts, d, f / kMxfp4BlockSize});
    } else {
      const bool is_transposed = spelling.layout == ExpertLayout::kFusedGptOss;
      tensors.gate_up.values =
          take_one(spelling.gate_up, DType::kBF16,
                   is_transposed ? Shape{num_experts, d, 2 * f} : Shape{num_experts, 2 * f, d});
      tensors.down.values =
          take_one(spelling.down, DType::kBF16,
                   is_transposed ? Shape{num_experts, f, d} : Shape{num_experts, d, f});
    }
    if (shape_.has_bias) take_biases(spelling, layer, tensors);
  }

  void take_biases(const Spelling& spelling, std::int64_t layer, LayerTensors& tensors) {
    tensors.gate_up_bias =
        take(fused_name(spelling, layer, "gate_up_proj_bias"), kNoExpert,
             {DType::kBF16, DType::kF32}, {shape_.num_experts, 2 * shape_.intermediate_dim});
    tensors.down_bias = take(fused_name(spelling, layer, "down_proj_bias"), kNoExpert,
                             {DType::kBF16, DType::kF32}, {shape_.num_experts, shape_.hidden_dim});
  }

  void check_mxfp4_dims() const {
    DISTMOE_CHECK(
        shape_.hidden_dim % kMxfp4BlockSize == 0 && shape_.intermediate_dim % kMxfp4BlockSize == 0,
        kUnsupported, label_, " has MXFP4 experts with D = ", shape_.hidden_dim,
        " and F = ", shape_.intermediate_dim, "; both must be multiples of ", kMxfp4BlockSize);
  }

  /// Null where it is not there.
  const TensorRef* find(std::string_view name) const {
    const auto place = std::ranges::lower_bound(found_, name, {}, name_of);
    return place == found_.end() || name_of(*place) != name ? nullptr : &*place;
  }

  /// Consumes a tensor. One that is not there is counted and reported with the others.
  TensorRef take(const std::string& name, std::int64_t expert, std::initializer_list<DType> dtypes,
                 const Shape& shape) {
    const TensorRef* place = find(name);
    if (place == nullptr) {
      if (num_missing_++ < kMaxListed) missing_ += concat("\n  ", name);
      return {};
    }
    const TensorRef ref = *place;
    is_read_[static_cast<std::size_t>(place - found_.data())] = true;
    const StoredTensor& tensor = *ref.tensor;
    const bool has_type = tensor.dtype && std::ranges::find(dtypes, *tensor.dtype) != dtypes.end();
    if (has_type && tensor.shape == shape) return ref;
    std::string legal;
    for (const DType dtype : dtypes)
      legal += concat(legal.empty() ? "" : " or ", stored_name_of(dtype));
    throw_error(ErrorCode::kIo, concat("tensor ", ref.describe(),
                                       expert == kNoExpert ? "" : concat(", expert ", expert, ','),
                                       " is ", tensor.describe(), "; config.json asks for ", legal,
                                       ' ', describe_shape(shape)));
  }

  void check_all_found_and_read() const {
    std::vector<std::string> unknown;
    for (std::size_t i = 0; i < found_.size(); ++i) {
      if (!is_read_[i] && !is_to_come(name_of(found_[i]))) {
        unknown.push_back("\n  " + found_[i].describe());
      }
    }
    if (num_missing_ == 0 && unknown.empty()) return;
    std::string message = concat("the experts in ", label_, " do not match its config.json (",
                                 config_.architecture, ", ", shape_.num_experts, " experts)");
    if (num_missing_ > 0) {
      message += concat("; expected and missing (", num_missing_,
                        num_missing_ > kMaxListed ? ", of which the first" : "", "):", missing_);
    }
    if (!unknown.empty()) {
      message += concat("\nexpert-like and not expected (", unknown.size(), "):");
      unknown.resize(std::min(unknown.size(), kMaxListed));
      for (const std::string& line : unknown) message += line;
    }
    throw_error(ErrorCode::kIo, message);
  }

  /// Whether a name belongs to a layer that was not reached because an earlier one has gaps.
  bool is_to_come(std::string_view name) const {
    const std::optional<std::int64_t> layer = layer_of(name);
    return layer && *layer > last_layer_ &&
           (std::ranges::binary_search(config_.moe_layers, *layer) ||
            std::ranges::binary_search(config_.optional_moe_layers, *layer));
  }

  const ModelConfig& config_;
  const LayerShape& shape_;
  const std::string& label_;
  std::vector<TensorRef> found_;  ///< the expert-like tensors of all shards, sorted by name
  std::vector<bool> is_read_;     ///< [found_]
  std::int64_t last_layer_ = -1;
  std::optional<bool> has_input_scales_;  ///< of the layer that is read
  std::size_t num_missing_ = 0;
  std::string missing_;
};

}  // namespace

std::string TensorRef::describe() const {
  return concat(quote(tensor->name), " in ", file->path().string());
}

std::map<std::int64_t, LayerTensors> catalog_experts(const ModelConfig& config,
                                                     std::span<const SafetensorsFile> shards,
                                                     const std::string& label) {
  return Cataloguer(config, shards, label).take_all();
}

}  // namespace distmoe
