// SPDX-License-Identifier: Apache-2.0
#include "dense_library.hpp"

namespace distmoe::bench {

std::vector<DenseLibrary> dense_libraries() {
  std::vector<DenseLibrary> all;
  const auto append = [&](std::vector<DenseLibrary> some) {
    for (DenseLibrary& library : some) all.push_back(std::move(library));
  };
  append(onednn_dense());
#ifdef DISTMOE_BENCH_OPENBLAS
  append(openblas_dense());
#endif
#ifdef DISTMOE_BENCH_EIGEN
  append(eigen_dense());
#endif
  return all;
}

}  // namespace distmoe::bench
