// SPDX-License-Identifier: Apache-2.0
#include "code_dump.hpp"

#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "backend/cpu/cpu_backend.hpp"
#include "core/check.hpp"
#include "runtime/forward.hpp"

namespace distmoe::tools {
namespace {

constexpr const char* kNoCodes = "--dump-codes writes the codes of one rank on the CPU";

const cpu::CpuBackend& backend_of(const Context& context) {
  const auto* backend = dynamic_cast<const cpu::CpuBackend*>(context.impl().backend());
  DISTMOE_CHECK(backend != nullptr && context.size() == 1, kInvalidArgument, kNoCodes);
  return *backend;
}

std::size_t num_elements(const std::vector<std::int64_t>& shape) {
  return static_cast<std::size_t>(
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
}

}  // namespace

CodeDump::Tensor& CodeDump::add(const std::string& name, DType dtype,
                                std::vector<std::int64_t> shape) {
  Tensor tensor{{name, dtype, std::move(shape)}, {}};
  tensor.bytes.resize(num_elements(tensor.entry.shape) * size_of(dtype));
  tensors_.push_back(std::move(tensor));
  return tensors_.back();
}

/// The coded rows of x or h2, as they are now, at the place of their token or route.
void CodeDump::add_rows(const std::string& name, const Context& context,
                        std::vector<std::int64_t> extents, bool by_route) {
  const cpu::CpuBackend& backend = backend_of(context);
  const cpu::CodedRows& rows = by_route ? backend.coded_h2() : backend.coded_x();
  const cpu::Routing& routing = backend.routing();
  std::vector<std::byte> codes;
  std::vector<std::byte> scales;
  std::vector<std::byte> factors;
  const auto copy = [](const void* from, std::int64_t row, std::int64_t size,
                       std::vector<std::byte>& to) {
    std::memcpy(to.data() + row * size, from, static_cast<std::size_t>(size));
  };
  const auto num_rows = static_cast<std::int64_t>(num_elements(extents));
  codes.resize(static_cast<std::size_t>(num_rows * rows.code_bytes()));
  scales.resize(static_cast<std::size_t>(num_rows * rows.scale_bytes()));
  factors.resize(static_cast<std::size_t>(num_rows) * sizeof(float));
  for (std::int64_t expert = 0; expert < routing.num_local_experts(); ++expert) {
    for (std::int64_t row = routing.expert_begin(expert); row < routing.expert_end(expert); ++row) {
      const RowOrigin& origin = routing.row_origin()[static_cast<std::size_t>(row)];
      const std::int64_t to = by_route ? origin.token * routing.top_k() + origin.k : origin.token;
      copy(rows.codes(row), to, rows.code_bytes(), codes);
      copy(rows.scales(row), to, rows.scale_bytes(), scales);
      const float scale = rows.result_factor(row);
      copy(&scale, to, sizeof(scale), factors);
    }
  }
  const auto with = [&](std::int64_t last) {
    std::vector<std::int64_t> shape = extents;
    shape.push_back(last);
    return shape;
  };
  add(name + "_codes", DType::kU8, with(rows.code_bytes())).bytes = std::move(codes);
  add(name + "_scales", DType::kU8, with(rows.scale_bytes())).bytes = std::move(scales);
  if (rows.has_factors()) {
    add(name + "_global_scales", DType::kF32, extents).bytes = std::move(factors);
  }
}

void CodeDump::add_weight(const std::string& name, const PreparedWeightView& weight) {
  const auto add_array = [&](const std::string& part, const TensorView& array, DType dtype) {
    if (!array.is_given()) return;
    std::vector<std::int64_t> shape(array.shape.begin(), array.shape.begin() + array.rank);
    std::vector<std::byte>& bytes = add(name + part, dtype, std::move(shape)).bytes;
    if (!bytes.empty()) std::memcpy(bytes.data(), array.data, bytes.size());
  };
  add_array("_codes", weight.codes, DType::kU8);
  add_array("_scales", weight.scales, DType::kU8);
  add_array("_global_scales", weight.global_scales, DType::kF32);
}

// NOTE: codes of h2 take the place of those of x in the staged pipeline, so each is looked at in
// its own step.
void CodeDump::run(Context& context, const RoutedInput& input, const ExpertWeights& weights,
                   const TensorView& y_TD) {
  backend_of(context);
  tensors_.clear();
  const std::int64_t tokens = input.x_TD.shape[0];
  const bool has_coded_rows = is_block_scaled(context.config().precision);
  const StepObserver observer = [&](ForwardStep next) {
    if (!has_coded_rows) return;
    if (next == ForwardStep::kW2Scatter) add_rows("x", context, {tokens}, false);
    if (next == ForwardStep::kCombine) {
      add_rows("h2", context, {tokens, context.config().top_k}, true);
    }
  };
  const CallOptions options;
  run_forward(context.impl(), {.input = input,
                               .weights = weights,
                               .y_TD = y_TD,
                               .options = options,
                               .observer = &observer});
  add_weight("w13", weights.prepared_w13);
  add_weight("w2", weights.prepared_w2);
}

void CodeDump::write(const std::filesystem::path& path) const {
  std::vector<TensorEntry> entries;
  for (const Tensor& tensor : tensors_) entries.push_back(tensor.entry);
  SafetensorsWriter file(path, entries);
  for (const Tensor& tensor : tensors_) file.append(tensor.bytes);
  file.commit();
}

}  // namespace distmoe::tools
