// SPDX-License-Identifier: Apache-2.0
//
// oneDNN in FP32 and BF16. `packed` lets the library choose how the second operand lies in memory
// and puts it there outside the timing.
#include <dlfcn.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <span>

#include "core/checked_math.hpp"
#include "dense_library.hpp"
#include "random_values.hpp"

namespace distmoe::bench {
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

class OneDnnProduct final : public DenseProduct {
 public:
  OneDnnProduct(const DenseShape& shape, int num_parts, memory::data_type type, bool packed) {
    hold_to_one_thread();
    const std::int64_t rows = ceil_div(shape.m, std::int64_t{num_parts});
    const memory::desc a({rows, shape.k}, type, memory::format_tag::ab);
    const memory::desc b({shape.k, shape.n}, type,
                         packed ? memory::format_tag::any : memory::format_tag::ab);
    const memory::desc c({rows, shape.n}, type, memory::format_tag::ab);
    const auto desc = describe(a, b, c);
    product_ = dnnl::matmul(desc);
    // Random bytes in the library's own order are random numbers too.
    b_ = memory(desc.weights_desc(), engine());
    fill(b_, 1);
    for (int part = 0; part < num_parts; ++part) {
      a_.emplace_back(a, engine());
      c_.emplace_back(c, engine());
      scratch_.emplace_back(desc.scratchpad_desc(), engine());
      fill(a_.back(), static_cast<std::uint64_t>(part) + 2);
    }
  }

  void run(int part) override {
    hold_to_one_thread();
    dnnl::stream stream(engine());
    const auto index = static_cast<std::size_t>(part);
    product_.execute(stream, {{DNNL_ARG_SRC, a_[index]},
                              {DNNL_ARG_WEIGHTS, b_},
                              {DNNL_ARG_DST, c_[index]},
                              {DNNL_ARG_SCRATCHPAD, scratch_[index]}});
    stream.wait();
  }

 private:
  dnnl::matmul product_;
  memory b_;
  std::vector<memory> a_;
  std::vector<memory> c_;
  std::vector<memory> scratch_;
};

/// False where the library has no product of this type on this processor.
bool is_supported(memory::data_type type) {
  try {
    OneDnnProduct({64, 64, 64}, 1, type, false).run(0);
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

}  // namespace

std::vector<DenseLibrary> onednn_dense() {
  const auto library = [](std::string name, memory::data_type type, bool packed) {
    return DenseLibrary{std::move(name), [type, packed](const DenseShape& shape, int num_parts) {
                          return std::make_unique<OneDnnProduct>(shape, num_parts, type, packed);
                        }};
  };
  std::vector<DenseLibrary> libraries;
  if (is_supported(memory::data_type::bf16)) {
    libraries.push_back(library("oneDNN BF16", memory::data_type::bf16, false));
    libraries.push_back(library("oneDNN BF16 packed", memory::data_type::bf16, true));
  }
  libraries.push_back(library("oneDNN FP32", memory::data_type::f32, false));
  return libraries;
}

}  // namespace distmoe::bench
