// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe run --dump-codes` writes: the codes and scales with which one rank computed one
// layer, in natural order.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "distmoe/context.hpp"
#include "distmoe/routed_experts.hpp"
#include "io/safetensors_writer.hpp"

namespace distmoe::tools {

class CodeDump {
 public:
  /// Makes one call of `context`, of one rank on the CPU, and keeps the codes that it took: those
  /// of x by token, of h2 by token and k (zeros where a route is disabled), of the weights by
  /// expert and row. Writes y.
  void run(Context& context, const RoutedInput& input, const ExpertWeights& weights,
           const TensorView& y_TD);
  /// Throws as SafetensorsWriter does.
  void write(const std::filesystem::path& path) const;

 private:
  struct Tensor {
    TensorEntry entry;
    std::vector<std::byte> bytes;
  };
  Tensor& add(const std::string& name, DType dtype, std::vector<std::int64_t> shape);
  void add_rows(const std::string& name, const Context& context, std::vector<std::int64_t> extents,
                bool by_route);
  void add_weight(const std::string& name, const PreparedWeightView& weight);

  std::vector<Tensor> tensors_;
};

}  // namespace distmoe::tools
