// SPDX-License-Identifier: Apache-2.0
//
// Eigen in FP32. Its BF16 is a storage type without products of its own.
#include <Eigen/Dense>

#include "bench/random_values.hpp"
#include "dense_library.hpp"

namespace distmoe::bench {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

class EigenProduct final : public DenseProduct {
 public:
  EigenProduct(const DenseShape& shape, int num_parts)
      : rows_((shape.m + num_parts - 1) / num_parts),
        a_(rows_ * num_parts, shape.k),
        b_(shape.k, shape.n),
        c_(rows_ * num_parts, shape.n) {
    tools::fill_random(std::span(a_.data(), static_cast<std::size_t>(a_.size())), 1);
    tools::fill_random(std::span(b_.data(), static_cast<std::size_t>(b_.size())), 2);
  }

  void run(int part) override {
    c_.middleRows(part * rows_, rows_).noalias() = a_.middleRows(part * rows_, rows_) * b_;
  }

 private:
  Eigen::Index rows_;
  Matrix a_;
  Matrix b_;
  Matrix c_;
};

}  // namespace

std::vector<DenseLibrary> eigen_dense() {
  return {{"Eigen FP32", [](const DenseShape& shape, int num_parts) {
             return std::make_unique<EigenProduct>(shape, num_parts);
           }}};
}

}  // namespace distmoe::bench
