// SPDX-License-Identifier: Apache-2.0
//
// oneDNN in FP32 and BF16. `packed` lets the library choose how the second operand lies in memory
// and puts it there outside the timing.
#include "bench/onednn_product.hpp"
#include "dense_library.hpp"

namespace distmoe::bench {
namespace {

using tools::OneDnnProduct;
using tools::ProductType;
using tools::ProductWeights;

class OneDnnDense final : public DenseProduct {
 public:
  OneDnnDense(const DenseShape& shape, int num_parts, ProductType type, ProductWeights weights)
      : product_({shape.m, shape.n, shape.k}, num_parts, type, weights) {}
  void run(int part) override { product_.run(part); }

 private:
  OneDnnProduct product_;
};

}  // namespace

std::vector<DenseLibrary> onednn_dense() {
  const auto library = [](std::string name, ProductType type, ProductWeights weights) {
    return DenseLibrary{std::move(name), [type, weights](const DenseShape& shape, int num_parts) {
                          return std::make_unique<OneDnnDense>(shape, num_parts, type, weights);
                        }};
  };
  std::vector<DenseLibrary> libraries;
  if (OneDnnProduct::is_supported(ProductType::kBF16)) {
    libraries.push_back(library("oneDNN BF16", ProductType::kBF16, ProductWeights::kRowMajor));
    libraries.push_back(library("oneDNN BF16 packed", ProductType::kBF16, ProductWeights::kPacked));
  }
  libraries.push_back(library("oneDNN FP32", ProductType::kF32, ProductWeights::kRowMajor));
  return libraries;
}

}  // namespace distmoe::bench
