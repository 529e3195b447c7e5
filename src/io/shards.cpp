// SPDX-License-Identifier: Apache-2.0
#include "io/shards.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "io/mapped_file.hpp"
#include "io/quote.hpp"

namespace distmoe {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxIndexBytes = 64 << 20;
constexpr std::size_t kMaxIndexDepth = 16;

/// Tensor name to shard name.
using WeightMap = std::map<std::string, std::string, std::less<>>;

/// Takes weight_map out of the events of the JSON parser and passes over everything else.
class IndexReader final : public nlohmann::json_sax<Json> {
 public:
  explicit IndexReader(const std::string& label) : label_(label) {}

  bool has_weight_map() const { return has_weight_map_; }
  WeightMap take() { return std::move(weight_map_); }

  bool key(std::string& name) override {
    key_.swap(name);
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ == 1 && key_ == "weight_map") {
      if (std::exchange(has_weight_map_, true)) refuse("has two weight_map entries");
      is_in_weight_map_ = true;
    } else if (is_in_weight_map_) {
      refuse("maps tensor " + quote(key_) + " to an object");
    }
    return descend();
  }

  bool end_object() override {
    --depth_;
    is_in_weight_map_ = false;
    return true;
  }

  bool start_array(std::size_t) override {
    expect_no_weight();
    if (depth_ == 0) refuse("is not a JSON object");
    return descend();
  }

  bool end_array() override {
    --depth_;
    return true;
  }

  bool string(std::string& value) override {
    if (!is_in_weight_map_) return true;
    if (!weight_map_.emplace(key_, std::move(value)).second) {
      refuse("names tensor " + quote(key_) + " twice");
    }
    return true;
  }

  bool null() override { return expect_no_weight(); }
  bool boolean(bool) override { return expect_no_weight(); }
  bool number_integer(std::int64_t) override { return expect_no_weight(); }
  bool number_unsigned(std::uint64_t) override { return expect_no_weight(); }
  bool number_float(double, const std::string&) override { return expect_no_weight(); }
  bool binary(Json::binary_t&) override { return expect_no_weight(); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    refuse(concat("is not valid JSON (in UTF-8) at byte ", position));
  }

 private:
  bool descend() {
    if (++depth_ > kMaxIndexDepth) refuse("nests too deeply");
    return true;
  }

  bool expect_no_weight() const {
    if (is_in_weight_map_) refuse("maps tensor " + quote(key_) + " to no file name");
    return true;
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw_error(ErrorCode::kIo, concat(label_, " ", why));
  }

  const std::string& label_;
  WeightMap weight_map_;
  std::string key_;
  std::size_t depth_ = 0;
  bool has_weight_map_ = false;
  bool is_in_weight_map_ = false;
};

WeightMap read_index(const std::filesystem::path& path) {
  const std::string label = path.string();
  const MappedFile file = MappedFile::open(path);
  DISTMOE_CHECK(file.bytes().size() <= kMaxIndexBytes, kIo, label, " has ", file.bytes().size(),
                " bytes; at most ", kMaxIndexBytes, " are read");
  const auto* text = reinterpret_cast<const char*>(file.bytes().data());
  IndexReader reader(label);
  Json::sax_parse(text, text + file.bytes().size(), &reader);
  DISTMOE_CHECK(reader.has_weight_map(), kIo, label, " lacks weight_map");
  return reader.take();
}

/// Shards lie beside their index; a name that leads elsewhere is an attack or a mistake.
void check_shard_name(const std::string& shard, const std::string& index) {
  constexpr std::string_view kNotInNames("/\\\0", 3);
  const bool is_plain = !shard.empty() && shard != "." && shard != ".." &&
                        shard.find_first_of(kNotInNames) == std::string::npos;
  DISTMOE_CHECK(is_plain, kIo, index, " names the shard ", quote(shard),
                ", which is no plain file name");
}

/// Every tensor lies in the shard that the index says and in no other.
void check_against_index(const std::vector<SafetensorsFile>& shards, const WeightMap& weight_map,
                         const std::string& index) {
  std::map<std::string_view, std::string> places;
  for (const SafetensorsFile& shard : shards) {
    for (const StoredTensor& tensor : shard.tensors()) {
      const auto [place, is_first] = places.emplace(tensor.name, shard.path().filename().string());
      DISTMOE_CHECK(is_first, kIo, "tensor ", quote(tensor.name), " lies in two shards, ",
                    place->second, " and ", shard.path().string());
      DISTMOE_CHECK(weight_map.contains(tensor.name), kIo, "tensor ", quote(tensor.name), " in ",
                    shard.path().string(), " is not in ", index);
    }
  }
  for (const auto& [tensor, shard] : weight_map) {
    const auto place = places.find(tensor);
    DISTMOE_CHECK(place != places.end() && place->second == shard, kIo, index, " places tensor ",
                  quote(tensor), " in ", quote(shard), ", which does not hold it");
  }
}

}  // namespace

std::vector<SafetensorsFile> open_shards(const std::filesystem::path& directory) {
  const std::filesystem::path single = directory / "model.safetensors";
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  std::vector<SafetensorsFile> shards;
  std::error_code error;
  if (std::filesystem::exists(single, error)) {
    shards.push_back(SafetensorsFile::open(single));
    return shards;
  }
  DISTMOE_CHECK(std::filesystem::exists(index, error), kIo, directory.string(),
                " has neither model.safetensors nor model.safetensors.index.json");
  const WeightMap weight_map = read_index(index);
  std::vector<std::string> names;
  for (const auto& [tensor, shard] : weight_map) names.push_back(shard);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  for (const std::string& name : names) check_shard_name(name, index.string());
  for (const std::string& name : names) {
    shards.push_back(SafetensorsFile::open(directory / name));
  }
  check_against_index(shards, weight_map, index.string());
  return shards;
}

}  // namespace distmoe
