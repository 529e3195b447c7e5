// SPDX-License-Identifier: Apache-2.0
//
// One dense product, [m x k] times [k x n], by each matrix library that was considered for the CPU
// backend. Every library is held to one thread a call and computes blocks of rows, one a thread, so
// that all get the same number of cores in the same way.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace distmoe::bench {

struct DenseShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n * k); }
};

/// A product with operands of its own, small random numbers.
class DenseProduct {
 public:
  virtual ~DenseProduct() = default;
  /// Computes block `part` of the rows on the calling thread.
  virtual void run(int part) = 0;
};

struct DenseLibrary {
  std::string name;  ///< with the operands: "oneDNN FP32"
  /// ceil(m / num_parts) rows a part.
  std::function<std::unique_ptr<DenseProduct>(const DenseShape&, int num_parts)> make;
};

/// Those that this build found, each with every form that it offers.
std::vector<DenseLibrary> dense_libraries();

// One a file.
std::vector<DenseLibrary> onednn_dense();
std::vector<DenseLibrary> openblas_dense();
std::vector<DenseLibrary> eigen_dense();

}  // namespace distmoe::bench
