// SPDX-License-Identifier: Apache-2.0
//
// OpenBLAS: sgemm, and sbgemm where the library was built with it (Debian's is not).
#include <cblas.h>
#include <dlfcn.h>

#include "bench/random_values.hpp"
#include "core/checked_math.hpp"
#include "dense_library.hpp"

namespace distmoe::bench {
namespace {

/// cblas_sbgemm by its published signature; headers declare it only where the library has it.
using SbGemm = void (*)(CBLAS_ORDER, CBLAS_TRANSPOSE, CBLAS_TRANSPOSE, blasint m, blasint n,
                        blasint k, float alpha, const BF16* a, blasint lda, const BF16* b,
                        blasint ldb, float beta, float* c, blasint ldc);

SbGemm find_sbgemm() { return reinterpret_cast<SbGemm>(dlsym(RTLD_DEFAULT, "cblas_sbgemm")); }

template <typename Element>
class OpenBlasProduct final : public DenseProduct {
 public:
  OpenBlasProduct(const DenseShape& shape, int num_parts)
      : m_(static_cast<blasint>(ceil_div(shape.m, std::int64_t{num_parts}))),
        n_(static_cast<blasint>(shape.n)),
        k_(static_cast<blasint>(shape.k)),
        a_(static_cast<std::size_t>(m_) * k_ * num_parts),
        b_(static_cast<std::size_t>(k_) * n_),
        c_(static_cast<std::size_t>(m_) * n_ * num_parts) {
    openblas_set_num_threads(1);
    tools::fill_random(std::span(a_), 1);
    tools::fill_random(std::span(b_), 2);
  }

  void run(int part) override {
    const Element* a = a_.data() + static_cast<std::size_t>(part) * m_ * k_;
    float* c = c_.data() + static_cast<std::size_t>(part) * m_ * n_;
    if constexpr (std::is_same_v<Element, float>) {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m_, n_, k_, 1.0f, a, k_, b_.data(), n_,
                  0.0f, c, n_);
    } else {
      static const SbGemm sbgemm = find_sbgemm();
      sbgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m_, n_, k_, 1.0f, a, k_, b_.data(), n_,
             0.0f, c, n_);
    }
  }

 private:
  blasint m_;
  blasint n_;
  blasint k_;
  std::vector<Element> a_;
  std::vector<Element> b_;
  std::vector<float> c_;
};

template <typename Element>
DenseLibrary library(std::string name) {
  return {std::move(name), [](const DenseShape& shape, int num_parts) {
            return std::make_unique<OpenBlasProduct<Element>>(shape, num_parts);
          }};
}

}  // namespace

std::vector<DenseLibrary> openblas_dense() {
  std::vector<DenseLibrary> libraries{library<float>("OpenBLAS FP32")};
  if (find_sbgemm() != nullptr) libraries.push_back(library<BF16>("OpenBLAS BF16"));
  return libraries;
}

}  // namespace distmoe::bench
