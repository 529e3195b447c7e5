// SPDX-License-Identifier: Apache-2.0
#include "quantised_checkpoint.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "formats/block_format.hpp"
#include "io/atomic_file.hpp"
#include "io/expert_loader.hpp"
#include "io/expert_names.hpp"
#include "io/mapped_file.hpp"
#include "io/quote.hpp"
#include "io/safetensors_writer.hpp"
#include "io/shards.hpp"
#include "output_error.hpp"
#include "quantised_experts.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kConfigFile = "config.json";

namespace fs = std::filesystem;

/// Files under temporary names, that of config.json among them, which is made first and renamed
/// last, and model.safetensors: removed, unless somebody still writes one of them.
void remove_leftovers(const fs::path& output) {
  std::vector<fs::path> temporaries;
  bool has_begun = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(output)) {
    const bool is_config = AtomicFile::is_temporary_of(kConfigFile, entry.path());
    if (is_config || AtomicFile::is_temporary_of(kSingleShardFile, entry.path())) {
      temporaries.push_back(entry.path());
    } else if (entry.path().filename() != kSingleShardFile) {
      return;
    }
    has_begun = has_begun || is_config;
  }
  if (!has_begun) return;
  for (const fs::path& temporary : temporaries) {
    DISTMOE_CHECK(AtomicFile::remove_abandoned(temporary), kInvalidArgument, "--output is ",
                  output.string(), ", where another process seems to write ",
                  temporary.filename().string());
  }
  fs::remove(output / kSingleShardFile);
}

/// The destination is known to be good before anything is read.
void prepare_output(const fs::path& output) {
  std::error_code error;
  if (fs::exists(output, error)) {
    if (fs::is_directory(output, error)) remove_leftovers(output);
    const bool is_empty_folder = fs::is_directory(output, error) && fs::is_empty(output, error);
    DISTMOE_CHECK(is_empty_folder && !error, kInvalidArgument, "--output is ", output.string(),
                  "; legal are a folder that does not exist yet or is empty");
    return;
  }
  fs::create_directories(output, error);
  DISTMOE_CHECK(!error, kInvalidArgument, "--output ", output.string(),
                " cannot be created: ", error.message());
}

/// Whether a reader finds the matrices of experts in this tensor; biases are copied.
bool is_expert_matrix(std::string_view name) {
  return is_expert_like(name) && !name.ends_with("_bias");
}

/// Names, order and contents of the file that is written.
class QuantisedFile {
 public:
  explicit QuantisedFile(const QuantiseRequest& request)
      : request_(request),
        checkpoint_(Checkpoint::open(request.checkpoint)),
        shards_(open_shards(request.checkpoint)),
        is_gpt_oss_(checkpoint_.architecture() == "GptOssForCausalLM"),
        counts_(block_format_of(precision_of(request.format))),
        block_(counts_.block_size) {
    check_supported();
    for (const SafetensorsFile& shard : shards_) {
      // Of a key that several files have the first counts.
      metadata_.insert(shard.metadata().begin(), shard.metadata().end());
      for (const StoredTensor& tensor : shard.tensors()) {
        if (!is_expert_matrix(tensor.name) || is_kept_scale(tensor)) copied_.push_back(&tensor);
      }
    }
    for (const StoredTensor* tensor : copied_) {
      check_copied(*tensor);
      entries_.push_back({tensor->name, tensor->known_dtype(), tensor->shape});
    }
    for (const std::int64_t layer : checkpoint_.moe_layers()) {
      is_gpt_oss_ ? declare_fused(layer) : declare_per_expert(layer);
    }
  }

  QuantiseSummary write(const QuantiseProgress& progress) {
    const LayerShape& shape = checkpoint_.shape();
    const auto num_layers = static_cast<std::int64_t>(checkpoint_.moe_layers().size());
    num_total_ = num_layers * shape.num_experts;
    summary_ = {checkpoint_.architecture(), num_layers, shape.num_experts};
    // Under a temporary name until everything else is in place.
    std::optional<AtomicFile> config;
    const std::string config_text = make_config();
    write_output([&] {
      config.emplace(request_.output / kConfigFile);
      config->write(std::as_bytes(std::span(config_text)));
    });
    SafetensorsWriter writer = open_writer();
    for (const StoredTensor* tensor : copied_) {
      summary_.copied_bytes += static_cast<std::int64_t>(tensor->data.size());
      append(writer, tensor->data);
    }
    for (const std::int64_t layer : checkpoint_.moe_layers()) {
      is_gpt_oss_ ? write_fused(writer, layer, progress)
                  : write_per_expert(writer, layer, progress);
    }
    write_output([&] {
      writer.commit();
      config->commit();
    });
    summary_.bf16_bytes =
        num_total_ * 3 * shape.hidden_dim * shape.intermediate_dim * std::int64_t{2};
    return summary_;
  }

 private:
  void check_supported() const {
    const LayerShape& shape = checkpoint_.shape();
    DISTMOE_CHECK(shape.hidden_dim % block_ == 0 && shape.intermediate_dim % block_ == 0,
                  kUnsupported, request_.checkpoint.string(), " has D = ", shape.hidden_dim,
                  " and F = ", shape.intermediate_dim, "; ", format_name(request_.format),
                  " needs multiples of ", block_);
    DISTMOE_CHECK(!is_gpt_oss_ || request_.format == StoredFormat::kMxfp4, kUnsupported,
                  "--format is ", format_name(request_.format), " and ",
                  request_.checkpoint.string(),
                  " is of architecture GptOssForCausalLM, whose fused experts have names for mxfp4 "
                  "alone");
  }

  /// The new quantization_config speaks of experts: codes of other modules would lose their
  /// meaning.
  void check_copied(const StoredTensor& tensor) const {
    const bool is_coded = !tensor.dtype || *tensor.dtype == DType::kF8E4M3 ||
                          *tensor.dtype == DType::kF8E5M2 || *tensor.dtype == DType::kF8E8M0 ||
                          *tensor.dtype == DType::kU8;
    DISTMOE_CHECK(
        !is_coded, kUnsupported, request_.checkpoint.string(), " has ", quote(tensor.name), ", ",
        tensor.describe(),
        ", beside its experts; only checkpoints whose other tensors are not quantised can "
        "be written");
  }

  /// The scale of activations belongs to the codes of NVFP4 that it came with.
  bool is_kept_scale(const StoredTensor& tensor) const {
    const std::optional<std::int64_t> layer = layer_of(tensor.name);
    return request_.format == StoredFormat::kNvfp4 && tensor.name.ends_with(".input_scale") &&
           layer && std::ranges::binary_search(checkpoint_.moe_layers(), *layer) &&
           checkpoint_.stored_format(*layer) == StoredFormat::kNvfp4;
  }

  const Spelling& spelling() const {
    const ExpertFamily family = is_gpt_oss_ ? ExpertFamily::kGptOss : ExpertFamily::kOutputMajor;
    for (const Spelling& candidate : spellings_of(family)) {
      const bool is_wanted = is_gpt_oss_ ? candidate.layout == ExpertLayout::kMxfp4GptOss
                             : checkpoint_.architecture() == "MixtralForCausalLM"
                                 ? candidate.block == "block_sparse_moe"
                                 : candidate.block == "mlp";
      if (is_wanted) return candidate;
    }
    throw_error(ErrorCode::kInternal, "no spelling to write experts in");
  }

  void declare_per_expert(std::int64_t layer) {
    const std::int64_t d = checkpoint_.shape().hidden_dim;
    const std::int64_t f = checkpoint_.shape().intermediate_dim;
    const bool is_mxfp8 = request_.format == StoredFormat::kMxfp8;
    const bool is_nvfp4 = request_.format == StoredFormat::kNvfp4;
    const auto declare = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
      entries_.push_back(
          {name, is_mxfp8 ? DType::kF8E4M3 : DType::kU8, {rows, counts_.code_bytes(cols)}});
      entries_.push_back({name + "_scale",
                          is_nvfp4 ? DType::kF8E4M3 : DType::kU8,
                          {rows, counts_.num_scales(cols)}});
      if (is_nvfp4) entries_.push_back({name + "_scale_2", DType::kF32, {}});
    };
    for (std::int64_t expert = 0; expert < checkpoint_.shape().num_experts; ++expert) {
      declare(per_expert_name(spelling(), layer, expert, spelling().gate), f, d);
      declare(per_expert_name(spelling(), layer, expert, spelling().up), f, d);
      declare(per_expert_name(spelling(), layer, expert, spelling().down), d, f);
    }
  }

  void declare_fused(std::int64_t layer) {
    const LayerShape& shape = checkpoint_.shape();
    const auto declare = [&](const char* matrix, std::int64_t rows, std::int64_t cols) {
      const std::string name = fused_name(spelling(), layer, matrix);
      const std::int64_t blocks = cols / block_;
      entries_.push_back(
          {name + "_blocks", DType::kU8, {shape.num_experts, rows, blocks, block_ / 2}});
      entries_.push_back({name + "_scales", DType::kU8, {shape.num_experts, rows, blocks}});
    };
    declare("gate_up_proj", 2 * shape.intermediate_dim, shape.hidden_dim);
    declare("down_proj", shape.hidden_dim, shape.intermediate_dim);
  }

  SafetensorsWriter open_writer() const {
    try {
      return SafetensorsWriter(request_.output / kSingleShardFile, entries_, metadata_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kIo) throw;
      throw OutputError(error.what());
    }
  }

  static void append(SafetensorsWriter& writer, std::span<const std::byte> bytes) {
    write_output([&] { writer.append(bytes); });
  }

  QuantisedExpert quantise(std::int64_t layer, std::int64_t expert,
                           const QuantiseProgress& progress) {
    QuantisedExpert quantised = quantise_expert(checkpoint_, layer, expert, request_.format);
    summary_.num_kept += quantised.weights.has_stored_codes() ? 1 : 0;
    for (const QuantisedMatrix* matrix : {&quantised.gate, &quantised.up, &quantised.down}) {
      summary_.coded_bytes +=
          static_cast<std::int64_t>(matrix->codes.size() + matrix->scales.size());
    }
    progress(++num_done_, num_total_);
    return quantised;
  }

  void write_per_expert(SafetensorsWriter& writer, std::int64_t layer,
                        const QuantiseProgress& progress) {
    for (std::int64_t expert = 0; expert < checkpoint_.shape().num_experts; ++expert) {
      const QuantisedExpert quantised = quantise(layer, expert, progress);
      for (const QuantisedMatrix* matrix : {&quantised.gate, &quantised.up, &quantised.down}) {
        append(writer, matrix->codes);
        append(writer, matrix->scales);
        if (request_.format != StoredFormat::kNvfp4) continue;
        append(writer, std::as_bytes(std::span(&matrix->global_scale, 1)));
        summary_.coded_bytes += std::int64_t{sizeof(float)};
      }
    }
  }

  /// Rows g0, u0, g1, u1, ... of the experts side by side; the scales wait for the last expert.
  void write_fused(SafetensorsWriter& writer, std::int64_t layer,
                   const QuantiseProgress& progress) {
    std::vector<std::byte> scales13;
    std::vector<std::byte> codes2;
    std::vector<std::byte> scales2;
    const std::int64_t f = checkpoint_.shape().intermediate_dim;
    const auto extend = [](std::vector<std::byte>& all, std::span<const std::byte> more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    const auto row_of = [f](std::span<const std::byte> matrix, std::int64_t row) {
      const std::size_t bytes = matrix.size() / static_cast<std::size_t>(f);
      return matrix.subspan(static_cast<std::size_t>(row) * bytes, bytes);
    };
    for (std::int64_t expert = 0; expert < checkpoint_.shape().num_experts; ++expert) {
      const QuantisedExpert quantised = quantise(layer, expert, progress);
      for (std::int64_t i = 0; i < 2 * f; ++i) {
        const QuantisedMatrix& matrix = i % 2 == 0 ? quantised.gate : quantised.up;
        append(writer, row_of(matrix.codes, i / 2));
        extend(scales13, row_of(matrix.scales, i / 2));
      }
      extend(codes2, quantised.down.codes);
      extend(scales2, quantised.down.scales);
    }
    for (const std::vector<std::byte>* bytes : {&scales13, &codes2, &scales2}) {
      append(writer, *bytes);
    }
  }

  /// The configuration of the source with another quantization_config.
  std::string make_config() const {
    const MappedFile file = MappedFile::open(request_.checkpoint / kConfigFile);
    const auto* text = reinterpret_cast<const char*>(file.bytes().data());
    Json config = Json::parse(text, text + file.bytes().size());
    const Json others = {"*self_attn*", "*embed_tokens*",  "*norm*", "*.gate",
                         "*.router",    "*shared_expert*", "lm_head"};
    if (request_.format == StoredFormat::kMxfp4) {
      config["quantization_config"] = {{"quant_method", "mxfp4"},
                                       {"modules_to_not_convert", others}};
    } else {
      const bool is_nvfp4 = request_.format == StoredFormat::kNvfp4;
      config["quantization_config"] = {{"quant_method", "modelopt"},
                                       {"quant_algo", is_nvfp4 ? "NVFP4" : "MXFP8"},
                                       {"group_size", block_},
                                       {"ignore", others}};
    }
    return config.dump(2) + '\n';
  }

  const QuantiseRequest& request_;
  Checkpoint checkpoint_;
  std::vector<SafetensorsFile> shards_;
  bool is_gpt_oss_;
  BlockFormat counts_;
  std::int64_t block_;
  Metadata metadata_;
  std::vector<const StoredTensor*> copied_;
  std::vector<TensorEntry> entries_;
  QuantiseSummary summary_;
  std::int64_t num_done_ = 0;
  std::int64_t num_total_ = 0;
};

}  // namespace

QuantiseSummary write_quantised_checkpoint(const QuantiseRequest& request,
                                           const QuantiseProgress& progress) {
  QuantisedFile file(request);
  prepare_output(request.output);
  return file.write(progress);
}

}  // namespace distmoe::tools
