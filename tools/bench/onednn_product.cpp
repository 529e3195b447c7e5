// SPDX-License-Identifier: Apache-2.0
#include "bench/onednn_product.hpp"

#include <dlfcn.h>

#include <cstddef>
#include <oneapi/dnnl/dnnl.hpp>
#include <span>
#include <vector>

#include "bench/random_values.hpp"
#include "core/checked_math.hpp"

namespace distmoe::tools {
namespace {

using dnnl::memory;

const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

/// oneDNN asks the OpenMP runtime that it was built with how many threads this thread may use.
void hold_to_one_thread() {
  static const auto set_num_threads =
      reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_num_threads != nullptr) set_num_threads(1);
}

dnnl::matmul::primitive_desc describe(const memory::desc& a, const memory::desc& b,
                                      const memory::desc& c) {
  // The scratchpad of a product belongs to one thread at a time: every part brings its own.
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine(), a, b, c, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine());
#endif
}

void fill(const memory& matrix, std::uint64_t seed) {
  const std::size_t bytes = matrix.get_desc().get_size();
  if (matrix.get_desc().data_type() == memory::data_type::f32) {
    fill_random(std::span(static_cast<float*>(matrix.get_data_handle()), bytes / 4), seed);
  } else {
    fill_random(std::span(static_cast<BF16*>(matrix.get_data_handle()), bytes / 2), seed);
  }
}

}  // namespace

struct OneDnnProduct::State {
  dnnl::matmul product;
  memory b;
  std::vector<memory> a;
  std::vector<memory> c;
  std::vector<memory> scratch;
};

OneDnnProduct::OneDnnProduct(const ProductShape& shape, int num_parts, ProductType type,
                             ProductWeights weights)
    : state_(std::make_unique<State>()) {
  hold_to_one_thread();
  const memory::data_type data_type =
      type == ProductType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
  const std::int64_t rows = ceil_div(shape.m, std::int64_t{num_parts});
  const memory::desc a({rows, shape.k}, data_type, memory::format_tag::ab);
  const memory::desc b(
      {shape.k, shape.n}, data_type,
      weights == ProductWeights::kPacked ? memory::format_tag::any : memory::format_tag::ab);
  const memory::desc c({rows, shape.n}, data_type, memory::format_tag::ab);
  const auto desc = describe(a, b, c);
  state_->product = dnnl::matmul(desc);
  // Random bytes in the library's own order are random numbers too.
  state_->b = memory(desc.weights_desc(), engine());
  fill(state_->b, 1);
  for (int part = 0; part < num_parts; ++part) {
    state_->a.emplace_back(a, engine());
    state_->c.emplace_back(c, engine());
    state_->scratch.emplace_back(desc.scratchpad_desc(), engine());
    fill(state_->a.back(), static_cast<std::uint64_t>(part) + 2);
  }
}

OneDnnProduct::~OneDnnProduct() = default;

void OneDnnProduct::run(int part) {
  hold_to_one_thread();
  dnnl::stream stream(engine());
  const auto index = static_cast<std::size_t>(part);
  state_->product.execute(stream, {{DNNL_ARG_SRC, state_->a[index]},
                                   {DNNL_ARG_WEIGHTS, state_->b},
                                   {DNNL_ARG_DST, state_->c[index]},
                                   {DNNL_ARG_SCRATCHPAD, state_->scratch[index]}});
  stream.wait();
}

bool OneDnnProduct::is_supported(ProductType type) {
  try {
    OneDnnProduct({64, 64, 64}, 1, type, ProductWeights::kRowMajor).run(0);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

}  // namespace distmoe::tools
