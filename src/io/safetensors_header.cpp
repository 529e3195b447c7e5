// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_header.hpp"

#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.hpp"
#include "io/quote.hpp"

namespace distmoe {
namespace {

using Json = nlohmann::json;

/// A state machine over the events of the JSON parser. The grammar nests three deep and every other
/// opening bracket is refused, so that hostile nesting ends at once.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& label) : label_(label) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (state_ == State::kStart) return enter(State::kRoot);
    if (state_ == State::kRoot && key_ == "__metadata__") {
      if (std::exchange(has_metadata_, true)) refuse("has two __metadata__ entries");
      return enter(State::kMetadata);
    }
    if (state_ != State::kRoot) refuse_value("an object");
    header_.entries.emplace_back().name = key_;
    has_dtype_ = has_shape_ = has_offsets_ = false;
    return enter(State::kTensor);
  }

  bool end_object() override {
    if (state_ == State::kRoot) return enter(State::kEnd);
    if (state_ == State::kTensor && !(has_dtype_ && has_shape_ && has_offsets_)) {
      refuse("lacks dtype, shape or data_offsets of " + quote(entry().name));
    }
    return enter(State::kRoot);
  }

  bool start_array(std::size_t) override {
    if (state_ == State::kTensor && key_ == "shape" && !std::exchange(has_shape_, true)) {
      return enter(State::kShape);
    }
    if (state_ == State::kTensor && key_ == "data_offsets" && !std::exchange(has_offsets_, true)) {
      num_offsets_ = 0;
      return enter(State::kOffsets);
    }
    refuse_value("an array");
  }

  bool end_array() override {
    if (state_ == State::kOffsets && num_offsets_ != 2) refuse_value("fewer than two offsets");
    return enter(State::kTensor);
  }

  bool key(std::string& name) override {
    key_.swap(name);
    return true;
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadata) {
      if (!header_.metadata.emplace(key_, value).second) refuse_value("a second value");
      return true;
    }
    if (state_ != State::kTensor || key_ != "dtype" || std::exchange(has_dtype_, true)) {
      refuse_value("a string");
    }
    entry().dtype_name.swap(value);
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (state_ == State::kShape) {
      constexpr auto kMaxExtent = std::numeric_limits<std::int64_t>::max();
      if (value > static_cast<std::uint64_t>(kMaxExtent)) refuse_value("an extent beyond 2^63 - 1");
      if (entry().shape.size() == kMaxStoredRank) refuse_value("more than 32 dimensions");
      entry().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (state_ != State::kOffsets) refuse_value("a number");
    if (num_offsets_ == 2) refuse_value("more than two offsets");
    (num_offsets_++ == 0 ? entry().begin : entry().end) = value;
    return true;
  }

  bool null() override { refuse_value("null"); }
  bool boolean(bool) override { refuse_value("a boolean"); }
  bool number_integer(std::int64_t) override { refuse_value("a negative number"); }
  bool number_float(double, const std::string&) override {
    refuse_value("a number that is no integer of 64 bits");
  }
  bool binary(Json::binary_t&) override { refuse_value("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    refuse(concat("is not valid JSON (in UTF-8) at byte ", position));
  }

 private:
  enum class State { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool enter(State state) {
    state_ = state;
    return true;
  }

  HeaderEntry& entry() { return header_.entries.back(); }

  [[noreturn]] void refuse(const std::string& why) const {
    throw_error(ErrorCode::kIo, concat("the safetensors header of ", label_, " ", why));
  }

  [[noreturn]] void refuse_value(const char* what) const {
    std::string where = state_ == State::kStart ? "at its start" : "at " + quote(key_);
    if (state_ == State::kTensor || state_ == State::kShape || state_ == State::kOffsets) {
      where += " of tensor " + quote(header_.entries.back().name);
    }
    refuse(concat("has ", what, " ", where, " where the format allows none"));
  }

  const std::string& label_;
  SafetensorsHeader header_;
  State state_ = State::kStart;
  std::string key_;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  int num_offsets_ = 0;
};

}  // namespace

SafetensorsHeader read_safetensors_header(std::string_view json, const std::string& label) {
  DISTMOE_CHECK(!json.empty() && json.front() == '{', kIo, "the safetensors header of ", label,
                " does not begin with '{'");
  // The JSON parser takes a NUL for the end of its input and would not see what follows.
  DISTMOE_CHECK(json.find('\0') == std::string_view::npos, kIo, "the safetensors header of ", label,
                " has a NUL byte");
  HeaderReader reader(label);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return reader.take();
}

}  // namespace distmoe
