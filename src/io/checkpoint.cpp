// SPDX-License-Identifier: Apache-2.0
#include "io/checkpoint.hpp"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "core/current_error.hpp"
#include "io/coded_loader.hpp"
#include "io/expert_catalog.hpp"
#include "io/expert_loader.hpp"
#include "io/model_config.hpp"
#include "io/shards.hpp"

namespace distmoe {
namespace {

constexpr const char* kConfigFile = "config.json";

}  // namespace

struct Checkpoint::Impl {
  std::filesystem::path directory;
  std::string label;
  std::string architecture;
  LayerShape shape;
  std::vector<SafetensorsFile> shards;
  std::map<std::int64_t, LayerTensors> layers;  ///< refers to the shards
  std::vector<std::int64_t> moe_layers;
};

Checkpoint Checkpoint::open(const std::filesystem::path& directory) {
  return only_errors("opening a checkpoint", [&] {
    auto impl = std::make_unique<Impl>();
    impl->directory = directory;
    impl->label = directory.string();
    const ModelConfig config = read_model_config(directory / kConfigFile);
    impl->architecture = config.architecture;
    impl->shape = config.shape;
    impl->shards = open_shards(directory);
    impl->layers = catalog_experts(config, impl->shards, impl->label);
    for (const auto& [layer, tensors] : impl->layers) impl->moe_layers.push_back(layer);
    return Checkpoint(std::move(impl));
  });
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

std::vector<std::filesystem::path> Checkpoint::well_known_files(
    const std::filesystem::path& directory) {
  return {directory / kConfigFile, directory / kSingleShardFile, directory / kShardIndexFile};
}

std::vector<std::filesystem::path> Checkpoint::files() const {
  std::vector<std::filesystem::path> files = well_known_files(impl_->directory);
  for (const SafetensorsFile& shard : impl_->shards) files.push_back(shard.path());
  return files;
}

const std::string& Checkpoint::architecture() const noexcept { return impl_->architecture; }
const LayerShape& Checkpoint::shape() const noexcept { return impl_->shape; }
const std::vector<std::int64_t>& Checkpoint::moe_layers() const noexcept {
  return impl_->moe_layers;
}

const Checkpoint::Impl& Checkpoint::checked(std::int64_t layer, std::int64_t first_expert,
                                            std::int64_t num_experts) const {
  const auto place = impl_->layers.find(layer);
  if (place == impl_->layers.end()) {
    std::string known;
    for (const std::int64_t moe_layer : impl_->moe_layers) {
      known += concat(known.empty() ? "" : ", ", moe_layer);
    }
    throw_error(ErrorCode::kInvalidArgument,
                concat("layer ", layer, " of ", impl_->label,
                       " has no routed experts; layers that have are ", known));
  }
  const std::int64_t total = impl_->shape.num_experts;
  DISTMOE_CHECK(first_expert >= 0 && num_experts >= 0 && first_expert <= total - num_experts,
                kInvalidArgument, "experts [", first_expert, ", ", first_expert, " + ", num_experts,
                ") were asked for; ", impl_->label, " has ", total, " in each layer");
  return *impl_;
}

LoadedExperts Checkpoint::load_experts(std::int64_t layer, std::int64_t first_expert,
                                       std::int64_t num_experts) const {
  return only_errors("loading experts", [&] {
    const Impl& impl = checked(layer, first_expert, num_experts);
    return distmoe::load_experts(impl.layers.at(layer), impl.shape, {first_expert, num_experts});
  });
}

CodedExperts Checkpoint::load_coded_experts(std::int64_t layer, std::int64_t first_expert,
                                            std::int64_t num_experts, BlockShape blocks) const {
  return only_errors("loading the codes of experts", [&] {
    const Impl& impl = checked(layer, first_expert, num_experts);
    return distmoe::load_coded_experts(impl.layers.at(layer), impl.shape,
                                       {first_expert, num_experts}, blocks);
  });
}

std::optional<StoredFormat> Checkpoint::stored_format(std::int64_t layer) const {
  const LayerTensors& tensors = checked(layer, 0, 0).layers.at(layer);
  if (tensors.layout != ExpertLayout::kPerExpert) return tensors.gate_up.format;
  const StoredFormat format = tensors.experts.front().gate.format;
  const bool is_common = std::ranges::all_of(tensors.experts, [&](const PerExpertTensors& own) {
    return own.gate.format == format && own.up.format == format && own.down.format == format;
  });
  return is_common ? std::optional(format) : std::nullopt;
}

}  // namespace distmoe
