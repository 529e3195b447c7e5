// SPDX-License-Identifier: Apache-2.0
//
// Invariant: `distmoe quantize` writes checkpoints that load back, bit for bit, as the quantisers'
// codes of the source's BF16 weights, with every other tensor unchanged; what a format cannot hold
// is refused with the values and leaves no checkpoint.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "command_testing.hpp"
#include "formats/mxfp4.hpp"
#include "formats/mxfp8.hpp"
#include "formats/nvfp4.hpp"
#include "io/atomic_file.hpp"
#include "io/checkpoint.hpp"
#include "io/safetensors.hpp"
#include "io/tiny_model.hpp"

namespace distmoe::tools {
namespace {

using distmoe::testing::make_tensor;
using distmoe::testing::OwnedTensor;
using distmoe::testing::TinyModel;
using distmoe::testing::write_tensors;

const TinyModel kModel{.num_experts = 3, .d = 96, .f = 64};

class QuantizeCommand : public CommandTest {
 protected:
  /// A checkpoint of BF16 experts whose values no format holds exactly, and another tensor.
  std::filesystem::path write_source(const std::string& architecture, const TinyModel& model,
                                     std::vector<OwnedTensor> tensors) {
    for (OwnedTensor& tensor : tensors) {
      for (std::size_t i = 0; tensor.dtype == DType::kBF16 && i + 1 < tensor.data.size(); i += 2) {
        tensor.data[i] = static_cast<std::byte>(i * 37 + i / 64);
      }
    }
    tensors.push_back(
        make_tensor("model.norm.weight", DType::kBF16, {3}, std::vector<std::uint16_t>{1, 2, 3}));
    std::filesystem::create_directories(file("source"));
    std::ofstream(file("source") / "config.json") << model.config(architecture, 1);
    write_tensors(file("source") / "model.safetensors", tensors, {{"format", "pt"}, {"a", "b"}});
    return file("source");
  }

  CommandResult quantize(const std::string& format, const std::filesystem::path& output,
                         const Words& more = {}) {
    return quantize(file("source"), format, output, more);
  }
  CommandResult quantize(const std::filesystem::path& source, const std::string& format,
                         const std::filesystem::path& output, const Words& more) {
    Words words = {command_path(), "quantize", "--checkpoint", source.string(),
                   "--format",     format,     "--output",     output.string()};
    words.insert(words.end(), more.begin(), more.end());
    return run_words(words);
  }
  /// That a checkpoint of `format` in file(format) is written again with the same bytes.
  void expect_kept(const std::string& format, int num_experts) {
    const std::filesystem::path again = file(format + "-again");
    const CommandResult result = quantize(file(format), format, again, {"--json"});
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.json()["kept_experts"], num_experts);
    for (const char* name : {"model.safetensors", "config.json"}) {
      EXPECT_TRUE(read_file(file(format) / name) == read_file(again / name)) << name;
    }
  }
};

template <typename Byte>
void expect_bytes(const TensorStorage& storage, std::size_t expert, std::size_t begin,
                  std::size_t num_experts, const std::vector<Byte>& expected) {
  const std::size_t per_expert = storage.num_bytes() / num_experts;
  ASSERT_LE(begin + expected.size(), per_expert);
  EXPECT_EQ(
      std::memcmp(storage.data() + expert * per_expert + begin, expected.data(), expected.size()),
      0);
}

/// Which matrix of a CodedWeight: W13 has two parts of an expert, gate and up.
struct Place {
  std::size_t expert;
  std::size_t part;
  std::size_t parts;
  std::size_t num_experts;
};

/// One matrix quantised here, compared with its place in what was loaded.
void expect_matrix(const CodedWeight& loaded, StoredFormat format, const BF16Rows& values,
                   float amax, const Place& place) {
  const auto& [expert, part, parts, num_experts] = place;
  const auto elements = static_cast<std::size_t>(values.num_rows * values.num_cols);
  if (format == StoredFormat::kMxfp8) {
    std::vector<E4M3> codes(elements);
    std::vector<E8M0> scales(elements / 32);
    quantise_mxfp8_rows(values,
                        {codes.data(), scales.data(), values.num_cols, values.num_cols / 32});
    expect_bytes(loaded.codes, expert, part * codes.size(), num_experts, codes);
    expect_bytes(loaded.scales, expert, part * scales.size(), num_experts, scales);
    return;
  }
  std::vector<std::uint8_t> codes(elements / 2);
  if (format == StoredFormat::kMxfp4) {
    std::vector<E8M0> scales(elements / 32);
    quantise_mxfp4(values,
                   {codes.data(), scales.data(), values.num_cols / 2, values.num_cols / 32});
    expect_bytes(loaded.scales, expert, part * scales.size(), num_experts, scales);
  } else {
    std::vector<E4M3> scales(elements / 16);
    const float global = 1.0f / quantise_nvfp4_expert(values, amax,
                                                      {codes.data(), scales.data(),
                                                       values.num_cols / 2, values.num_cols / 16});
    expect_bytes(loaded.scales, expert, part * scales.size(), num_experts, scales);
    const auto* globals = reinterpret_cast<const float*>(loaded.global_scales.data());
    EXPECT_EQ(globals[expert * parts + part], global);
  }
  expect_bytes(loaded.codes, expert, part * codes.size(), num_experts, codes);
}

void expect_quantised(const Checkpoint& source, const Checkpoint& output, StoredFormat format) {
  ASSERT_EQ(output.shape(), source.shape());
  const LayerShape& shape = source.shape();
  const std::int64_t d = shape.hidden_dim;
  const std::int64_t f = shape.intermediate_dim;
  const CodedExperts coded = output.load_coded_experts(0, 0, shape.num_experts);
  EXPECT_EQ(coded.format, format);
  const auto num_experts = static_cast<std::size_t>(shape.num_experts);
  for (std::size_t expert = 0; expert < num_experts; ++expert) {
    const LoadedExperts own = source.load_experts(0, static_cast<std::int64_t>(expert), 1);
    const auto* w13 = reinterpret_cast<const BF16*>(own.w13.data());
    const auto* w2 = reinterpret_cast<const BF16*>(own.w2.data());
    const float amax = amax_of({w13, 2 * f, d, d});
    const BF16Rows down{w2, d, f, f};
    expect_matrix(coded.w13, format, {w13, f, d, d}, amax, {expert, 0, 2, num_experts});
    expect_matrix(coded.w13, format, {w13 + f * d, f, d, d}, amax, {expert, 1, 2, num_experts});
    expect_matrix(coded.w2, format, down, amax_of(down), {expert, 0, 1, num_experts});
  }
}

constexpr std::pair<const char*, StoredFormat> kFormats[] = {{"mxfp8", StoredFormat::kMxfp8},
                                                             {"mxfp4", StoredFormat::kMxfp4},
                                                             {"nvfp4", StoredFormat::kNvfp4}};

TEST_F(QuantizeCommand, WritesWhatLoadsBackAsTheCodesOfTheSource) {
  write_source("Qwen3MoeForCausalLM", kModel, kModel.per_expert(0, TinyModel::projection_name));
  const Checkpoint source = Checkpoint::open(file("source"));
  for (const auto& [name, format] : kFormats) {
    SCOPED_TRACE(name);
    const CommandResult result = quantize(name, file(name), {"--json"});
    ASSERT_EQ(result.exit_code, 0) << result.error;
    EXPECT_EQ(result.json()["format"], name);
    EXPECT_EQ(result.json()["experts"], 3);
    EXPECT_EQ(result.json()["bf16_bytes"], 3 * 3 * 96 * 64 * 2);
    EXPECT_EQ(result.json()["copied_bytes"], 6);
    const Checkpoint output = Checkpoint::open(file(name));
    expect_quantised(source, output, format);
    const SafetensorsFile written = SafetensorsFile::open(file(name) / "model.safetensors");
    const StoredTensor* norm = written.find("model.norm.weight");
    ASSERT_NE(norm, nullptr);
    EXPECT_EQ(norm->describe(), "BF16 [3]");
    EXPECT_EQ(std::to_integer<int>(norm->data[4]), 3);
    EXPECT_EQ(written.metadata(), (Metadata{{"format", "pt"}, {"a", "b"}}));
    EXPECT_EQ(result.json()["kept_experts"], 0);
    expect_kept(name, 3);
  }
}

/// Codes of another quantiser, whose scales ours would choose otherwise, and the scale of
/// activations that came with them.
TEST_F(QuantizeCommand, KeepsTheBytesOfExpertsThatAreOfTheFormat) {
  std::vector<OwnedTensor> tensors = kModel.per_expert(0, TinyModel::projection_name);
  write_source("Qwen3MoeForCausalLM", kModel, tensors);
  ASSERT_EQ(quantize("nvfp4", file("first")).exit_code, 0);
  const SafetensorsFile first = SafetensorsFile::open(file("first") / "model.safetensors");
  std::vector<OwnedTensor> foreign;
  for (const StoredTensor& tensor : first.tensors()) {
    OwnedTensor own{
        tensor.name, tensor.known_dtype(), tensor.shape, {tensor.data.begin(), tensor.data.end()}};
    // E4M3 scales twice as large, factors of the gate unlike those of the up rows.
    if (own.name.ends_with("weight_scale")) own.data[0] = std::byte{0x41};
    if (own.name.ends_with("gate_proj.weight_scale_2")) own.data[0] ^= std::byte{1};
    foreign.push_back(std::move(own));
  }
  for (std::int64_t expert = 0; expert < 3; ++expert) {
    for (const int role : {TinyModel::kGate, TinyModel::kUp, TinyModel::kDown}) {
      std::string name = TinyModel::projection_name(0, expert, role);
      name.replace(name.rfind("weight"), 6, "input_scale");
      foreign.push_back(make_tensor(name, DType::kF32, {},
                                    std::vector<float>{static_cast<float>(expert + role) + 1}));
    }
  }
  std::filesystem::create_directories(file("foreign"));
  std::filesystem::copy(file("first") / "config.json", file("foreign") / "config.json");
  write_tensors(file("foreign") / "model.safetensors", foreign);
  const CommandResult result = quantize(file("foreign"), "nvfp4", file("kept"), {"--json"});
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.json()["kept_experts"], 3);
  const SafetensorsFile kept = SafetensorsFile::open(file("kept") / "model.safetensors");
  EXPECT_EQ(kept.tensors().size(), foreign.size());
  for (const OwnedTensor& tensor : foreign) {
    const StoredTensor* found = kept.find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_TRUE(std::ranges::equal(found->data, tensor.data)) << tensor.name;
  }
}

TEST_F(QuantizeCommand, WritesWhereAKilledRunLeftSomething) {
  write_source("Qwen3MoeForCausalLM", kModel, kModel.per_expert(0, TinyModel::projection_name));
  const std::filesystem::path out = file("out");
  std::filesystem::create_directories(out);
  for (const char* name : {"config.json.partial-1f", "model.safetensors.partial-2e",
                           "model.safetensors.partial-3d", "model.safetensors"}) {
    std::ofstream(out / name) << "half";
  }
  {
    // Somebody still writes: nothing of it may go.
    const AtomicFile live(out / "model.safetensors");
    const CommandResult refused = quantize("mxfp8", out);
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_NE(refused.error.find("another process"), std::string::npos) << refused.error;
    EXPECT_TRUE(std::filesystem::exists(out / "model.safetensors"));
  }
  std::ofstream(out / "config.json.partial-1f") << "half";
  ASSERT_EQ(quantize("mxfp8", out).exit_code, 0);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(out), {}), 2);
  expect_quantised(Checkpoint::open(file("source")), Checkpoint::open(out), StoredFormat::kMxfp8);
  // A folder with anything else is somebody's own.
  std::ofstream(file("source") / "config.json.partial-1f") << "half";
  EXPECT_EQ(quantize("mxfp8", file("source")).exit_code, 2);
  EXPECT_TRUE(std::filesystem::exists(file("source") / "config.json.partial-1f"));
}

TEST_F(QuantizeCommand, KeepsTheNamesOfMixtralAndGptOss) {
  write_source("MixtralForCausalLM", kModel, kModel.per_expert(0, TinyModel::mixtral_name));
  ASSERT_EQ(quantize("nvfp4", file("mixtral")).exit_code, 0);
  EXPECT_NE(SafetensorsFile::open(file("mixtral") / "model.safetensors")
                .find("model.layers.0.block_sparse_moe.experts.2.w3.weight_scale_2"),
            nullptr);
  expect_quantised(Checkpoint::open(file("source")), Checkpoint::open(file("mixtral")),
                   StoredFormat::kNvfp4);
  std::filesystem::remove_all(file("source"));
  write_source("GptOssForCausalLM", kModel, kModel.gpt_oss(0));
  const CommandResult result = quantize("mxfp4", file("gptoss"));
  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("in bf16"), std::string::npos) << result.output;
  const Checkpoint source = Checkpoint::open(file("source"));
  const Checkpoint output = Checkpoint::open(file("gptoss"));
  expect_quantised(source, output, StoredFormat::kMxfp4);
  const LoadedExperts before = source.load_experts(0, 1, 1);
  const LoadedExperts after = output.load_experts(0, 1, 1);
  EXPECT_EQ(std::memcmp(before.bias13.data(), after.bias13.data(), before.bias13.num_bytes()), 0);
  std::filesystem::rename(file("gptoss"), file("mxfp4"));
  expect_kept("mxfp4", 3);
}

TEST_F(QuantizeCommand, RefusesWhatTheFormatCannotHold) {
  write_source("GptOssForCausalLM", kModel, kModel.gpt_oss(0));
  const CommandResult fused = quantize("nvfp4", file("fused"));
  EXPECT_EQ(fused.exit_code, 3);
  EXPECT_NE(fused.error.find("GptOssForCausalLM"), std::string::npos) << fused.error;
  std::filesystem::remove_all(file("source"));
  const TinyModel narrow{.num_experts = 2, .d = 80, .f = 32};
  write_source("Qwen3MoeForCausalLM", narrow, narrow.per_expert(0, TinyModel::projection_name));
  const CommandResult wide = quantize("mxfp8", file("wide"));
  EXPECT_EQ(wide.exit_code, 3);
  EXPECT_NE(wide.error.find("D = 80"), std::string::npos) << wide.error;
  EXPECT_NE(wide.error.find("multiples of 32"), std::string::npos) << wide.error;
  EXPECT_FALSE(std::filesystem::exists(file("wide")));
  EXPECT_EQ(quantize("nvfp4", file("narrow")).exit_code, 0) << "80 is a multiple of 16";
}

TEST_F(QuantizeCommand, RefusesWeightsThatAreNoNumbersAndThoseBeyondMxfp4) {
  for (const auto& [bits, format] :
       {std::pair{0x7FC0, "mxfp8"}, {0x7F80, "nvfp4"}, {0x7F7F, "mxfp4"}}) {
    std::vector<OwnedTensor> tensors = kModel.per_expert(0, TinyModel::projection_name);
    std::filesystem::remove_all(file("source"));
    write_source("Qwen3MoeForCausalLM", kModel, tensors);
    for (OwnedTensor& tensor : tensors) {
      if (tensor.name != TinyModel::projection_name(0, 1, TinyModel::kUp)) continue;
      std::memcpy(&tensor.data[2 * (5 * 96 + 70)], &bits, 2);
    }
    write_tensors(file("source") / "model.safetensors", tensors);
    const CommandResult result = quantize(format, file("out"));
    EXPECT_EQ(result.exit_code, 3) << format;
    for (const char* part : {"layer 0", "expert 1", "NaN, infinite or too large"}) {
      EXPECT_NE(result.error.find(part), std::string::npos) << result.error;
    }
    EXPECT_FALSE(std::filesystem::exists(file("out") / "model.safetensors"));
    EXPECT_FALSE(std::filesystem::exists(file("out") / "config.json"));
  }
}

TEST_F(QuantizeCommand, RefusesAnOutputThatHoldsSomething) {
  write_source("Qwen3MoeForCausalLM", kModel, kModel.per_expert(0, TinyModel::projection_name));
  const CommandResult result = quantize("mxfp8", file("source"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.error.find("is empty"), std::string::npos) << result.error;
  EXPECT_EQ(quantize("int8", file("out")).exit_code, 2);
}

TEST_F(QuantizeCommand, RefusesToCopyOtherQuantisedTensors) {
  std::vector<OwnedTensor> tensors = kModel.per_expert(0, TinyModel::projection_name);
  tensors.push_back(make_tensor("model.layers.0.self_attn.q_proj.weight", DType::kF8E4M3, {2},
                                std::vector<std::uint8_t>{1, 2}));
  write_source("Qwen3MoeForCausalLM", kModel, tensors);
  const CommandResult result = quantize("mxfp8", file("out"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("q_proj"), std::string::npos) << result.error;
}

}  // namespace
}  // namespace distmoe::tools
