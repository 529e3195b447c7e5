// SPDX-License-Identifier: Apache-2.0
#include "io/shards.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
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

/// What to do with an entry of weight_map.
using VisitEntry = std::function<void(const std::string& tensor, const std::string& shard)>;

/// Takes weight_map out of the events of the JSON parser and passes over everything else.
class IndexReader final : public nlohmann::json_sax<Json> {
 public:
  IndexReader(const std::string& label, const VisitEntry& visit) : label_(label), visit_(visit) {}

  bool has_weight_map() const { return has_weight_map_; }

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
    if (is_in_weight_map_) visit_(key_, value);
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
  const VisitEntry& visit_;
  std::string key_;
  std::size_t depth_ = 0;
  bool has_weight_map_ = false;
  bool is_in_weight_map_ = false;
};

/// The index is read twice, first for the shards and then for the tensors: a large model has tens
/// of thousands of tensors, and their names are not worth holding a second time.
class Index {
 public:
  explicit Index(const std::filesystem::path& path)
      : label_(path.string()), file_(MappedFile::open(path)) {
    DISTMOE_CHECK(file_.bytes().size() <= kMaxIndexBytes, kIo, label_, " has ",
                  file_.bytes().size(), " bytes; at most ", kMaxIndexBytes, " are read");
  }

  const std::string& label() const { return label_; }

  void for_each(const VisitEntry& visit) const {
    const auto* text = reinterpret_cast<const char*>(file_.bytes().data());
    IndexReader reader(label_, visit);
    Json::sax_parse(text, text + file_.bytes().size(), &reader);
    DISTMOE_CHECK(reader.has_weight_map(), kIo, label_, " lacks weight_map");
  }

 private:
  std::string label_;
  MappedFile file_;
};

/// Shards lie beside their index; a name that leads elsewhere is an attack or a mistake.
void check_shard_name(const std::string& shard, const std::string& index) {
  constexpr std::string_view kNotInNames("/\\\0", 3);
  const bool is_plain = !shard.empty() && shard != "." && shard != ".." &&
                        shard.find_first_of(kNotInNames) == std::string::npos;
  DISTMOE_CHECK(is_plain, kIo, index, " names the shard ", quote(shard),
                ", which is no plain file name");
}

/// The shards' names, each once.
std::set<std::string> shard_names(const Index& index) {
  std::set<std::string> names;
  index.for_each([&](const std::string&, const std::string& shard) {
    if (!names.contains(shard)) check_shard_name(shard, index.label());
    names.insert(shard);
  });
  return names;
}

/// A tensor that the index does not place where `shard` has it.
[[noreturn]] void refuse_unlisted(const StoredTensor& tensor, const SafetensorsFile& shard,
                                  const std::vector<SafetensorsFile>& shards,
                                  const std::string& index) {
  for (const SafetensorsFile& other : shards) {
    DISTMOE_CHECK(&other == &shard || other.find(tensor.name) == nullptr, kIo, "tensor ",
                  quote(tensor.name), " lies in two shards, ", other.path().string(), " and ",
                  shard.path().string());
  }
  throw_error(ErrorCode::kIo, concat("tensor ", quote(tensor.name), " in ", shard.path().string(),
                                     " is not in ", index));
}

/// Every tensor lies in the shard that the index says and in no other.
void check_against_index(const std::vector<SafetensorsFile>& shards, const Index& index) {
  std::map<std::string, std::size_t> shard_of_name;
  std::vector<std::vector<bool>> is_listed;
  for (const SafetensorsFile& shard : shards) {
    shard_of_name.emplace(shard.path().filename().string(), is_listed.size());
    is_listed.emplace_back(shard.tensors().size(), false);
  }
  index.for_each([&](const std::string& name, const std::string& shard) {
    const auto place = shard_of_name.find(shard);
    const StoredTensor* tensor =
        place == shard_of_name.end() ? nullptr : shards[place->second].find(name);
    DISTMOE_CHECK(tensor != nullptr, kIo, index.label(), " places tensor ", quote(name), " in ",
                  quote(shard), ", which does not hold it");
    const auto position = static_cast<std::size_t>(tensor - shards[place->second].tensors().data());
    DISTMOE_CHECK(!is_listed[place->second][position], kIo, index.label(), " names tensor ",
                  quote(name), " twice");
    is_listed[place->second][position] = true;
  });
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto unlisted = std::find(is_listed[i].begin(), is_listed[i].end(), false);
    if (unlisted == is_listed[i].end()) continue;
    const auto position = static_cast<std::size_t>(unlisted - is_listed[i].begin());
    refuse_unlisted(shards[i].tensors()[position], shards[i], shards, index.label());
  }
}

}  // namespace

std::vector<SafetensorsFile> open_shards(const std::filesystem::path& directory) {
  const std::filesystem::path single = directory / kSingleShardFile;
  const std::filesystem::path index_path = directory / kShardIndexFile;
  std::vector<SafetensorsFile> shards;
  std::error_code error;
  if (std::filesystem::exists(single, error)) {
    shards.push_back(SafetensorsFile::open(single));
    return shards;
  }
  DISTMOE_CHECK(std::filesystem::exists(index_path, error), kIo, directory.string(),
                " has neither ", kSingleShardFile, " nor ", kShardIndexFile);
  const Index index(index_path);
  for (const std::string& name : shard_names(index)) {
    shards.push_back(SafetensorsFile::open(directory / name));
  }
  check_against_index(shards, index);
  return shards;
}

}  // namespace distmoe
