// SPDX-License-Identifier: Apache-2.0
//
// A dense product of oneDNN, [m x k] times [k x n], with random operands of its own. The rows are
// cut into parts, one a thread: the library is held to the calling thread, as the CPU backend holds
// it.
#pragma once

#include <cstdint>
#include <memory>

namespace distmoe::tools {

struct ProductShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  double flops() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n * k); }
};

enum class ProductType { kBF16, kF32 };
/// How the second operand lies in memory: row-major, or as the library likes best, put there before
/// anything is timed.
enum class ProductWeights { kRowMajor, kPacked };

class OneDnnProduct {
 public:
  /// False where the library has no product of this type on this processor.
  static bool is_supported(ProductType type);

  /// ceil(m / num_parts) rows a part.
  OneDnnProduct(const ProductShape& shape, int num_parts, ProductType type, ProductWeights weights);
  ~OneDnnProduct();
  OneDnnProduct(const OneDnnProduct&) = delete;
  OneDnnProduct& operator=(const OneDnnProduct&) = delete;

  /// Computes part `part` on the calling thread. Parts may run at the same time.
  void run(int part);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace distmoe::tools
