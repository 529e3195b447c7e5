// SPDX-License-Identifier: Apache-2.0
#include "checkpoint_problem.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>

#include "io/checkpoint.hpp"
#include "io/routed_input.hpp"

namespace distmoe::tools {
namespace {

std::vector<float> floats_of(const TensorStorage& storage, DType dtype) {
  const std::size_t count = storage.num_bytes() / size_of(dtype);
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = dtype == DType::kF32 ? reinterpret_cast<const float*>(storage.data())[i]
                                     : to_float(reinterpret_cast<const BF16*>(storage.data())[i]);
  }
  return values;
}

}  // namespace

TensorFile::TensorFile(const std::filesystem::path& path) : file_(SafetensorsFile::open(path)) {}

const StoredTensor& TensorFile::tensor(const std::string& name) const {
  const StoredTensor* found = file_.find(name);
  if (found == nullptr) throw std::runtime_error("no tensor " + name);
  return *found;
}

std::vector<float> TensorFile::values(const std::string& name) const {
  const StoredTensor& stored = tensor(name);
  std::vector<float> values;
  if (stored.dtype == DType::kF32) {
    values.resize(stored.data.size() / sizeof(float));
    std::memcpy(values.data(), stored.data.data(), stored.data.size());
    return values;
  }
  const std::vector<BF16> stored_rows = rows(name);
  values.reserve(stored_rows.size());
  for (const BF16 value : stored_rows) values.push_back(to_float(value));
  return values;
}

std::vector<BF16> TensorFile::rows(const std::string& name) const {
  const StoredTensor& stored = tensor(name);
  EXPECT_EQ(stored.dtype, DType::kBF16) << name;
  std::vector<BF16> values(stored.data.size() / sizeof(BF16));
  std::memcpy(values.data(), stored.data.data(), stored.data.size());
  return values;
}

std::vector<std::uint8_t> TensorFile::bytes_of(const std::string& name) const {
  const auto data = tensor(name).data;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(data.data());
  return {bytes, bytes + data.size()};
}

std::map<std::string, std::string> TensorFile::bytes() const {
  std::map<std::string, std::string> bytes;
  for (const StoredTensor& stored : file_.tensors()) {
    bytes[stored.name] = {reinterpret_cast<const char*>(stored.data.data()), stored.data.size()};
  }
  return bytes;
}

conformance::MoeProblem problem_of(const std::filesystem::path& folder, std::int64_t layer) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const LayerShape& shape = checkpoint.shape();
  const LoadedExperts experts = checkpoint.load_experts(layer, 0, shape.num_experts);
  const RoutedInputFile input = RoutedInputFile::open(folder / "routed_experts.safetensors", layer);
  conformance::MoeProblem problem;
  problem.shape = {input.num_tokens(), shape.hidden_dim, shape.intermediate_dim, shape.num_experts,
                   input.top_k()};
  problem.activation = shape.activation;
  problem.alpha = shape.swiglu_alpha;
  problem.limit = shape.swiglu_limit;
  const auto* x = static_cast<const BF16*>(input.input().x_TD.data);
  problem.x.assign(x, x + input.input().x_TD.num_elements());
  const auto* ids = static_cast<const std::int32_t*>(input.input().topk_ids_TK.data);
  problem.ids.assign(ids, ids + problem.num_routes());
  const auto* scores = static_cast<const float*>(input.input().topk_scores_TK.data);
  problem.scores.assign(scores, scores + problem.num_routes());
  split_halves(reinterpret_cast<const BF16*>(experts.w13.data()), shape.num_experts,
               shape.intermediate_dim * shape.hidden_dim, problem.gate, problem.up);
  const auto* down = reinterpret_cast<const BF16*>(experts.w2.data());
  problem.down.assign(down, down + problem.gate.size());
  if (experts.has_bias) {
    const std::vector<float> bias13 = floats_of(experts.bias13, experts.bias13_dtype);
    split_halves(bias13.data(), shape.num_experts, shape.intermediate_dim, problem.gate_bias,
                 problem.up_bias);
    problem.down_bias = floats_of(experts.bias2, experts.bias2_dtype);
  }
  return problem;
}

}  // namespace distmoe::tools
