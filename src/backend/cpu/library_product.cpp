// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/library_product.hpp"

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"
#include "layout/cpu_workspace.hpp"

namespace distmoe::cpu {
namespace {

using dnnl::memory;

// NOTE: every distinct number of rows makes the library generate code, and routing brings any
// number. The code of a product takes 70 to 90 KB where vector registers divide depth and columns
// and up to 180 KB where they don't (oneDNN 2.6.3, Zen 4, every number of rows to 512): at most 23
// MiB with these bounds, while the library's default of 1024 products could hold 180. Fewer would
// cost time: bench_cpu_bars has about 210 shapes and generating one takes about 0.5 ms, so that 48,
// 64 or 96 products make its T=1024 about 10 % slower.
constexpr std::size_t kCachedProducts = 256;
constexpr std::size_t kCachedProductsWithTails = 64;
// NOTE: the library's products of operands by depth, a backward's, generate no code for their
// shape: 15 KB and 25 us each, with a sum 43 KB and 85 us (or 22 KB and 180 us where a row of b is
// a whole row of the matrix). So few are kept: those of the experts at work.
constexpr std::size_t kCachedProductsByDepth = 64;

// NOTE: of a product of packed columns code is generated for every number of rows, 100 us each, and
// a training step has as many of them as of its forward's products.
constexpr std::size_t kCachedPackedProducts = 256;

bool is_by_depth(const ProductShape& shape) { return shape.a_is_by_depth || shape.b_is_by_depth; }

bool has_tail(const ProductShape& shape) {
  constexpr std::int64_t kDepthBlock = 32;
  constexpr std::int64_t kColumnBlock = 16;
  return shape.depth % kDepthBlock != 0 || shape.b_rows % kColumnBlock != 0;
}

const dnnl::engine& engine() {
  static const dnnl::engine instance(dnnl::engine::kind::cpu, 0);
  return instance;
}

dnnl::stream& stream_of_this_thread() {
  thread_local dnnl::stream instance(engine());
  return instance;
}

struct Operands {
  memory::desc a;
  memory::desc b;
  memory::desc out;
};

Operands operands(const ProductShape& shape) {
  const auto strides = [](bool is_by_rows, std::int64_t stride) {
    return is_by_rows ? memory::dims{stride, 1} : memory::dims{1, stride};
  };
  return {
      memory::desc({shape.a_rows, shape.depth}, shape.type,
                   strides(!shape.a_is_by_depth, shape.a_stride)),
      shape.b_is_packed
          ? memory::desc({shape.depth, shape.b_rows}, shape.type, memory::format_tag::any)
          : memory::desc({shape.depth, shape.b_rows}, shape.type,
                         strides(shape.b_is_by_depth, shape.b_stride)),
      memory::desc({shape.a_rows, shape.b_rows}, memory::data_type::f32, {shape.out_stride, 1})};
}

/// What the threads share.
struct DescribedProduct {
  dnnl::matmul product;
  memory::desc b;  ///< as the library takes it
  memory::desc scratch;
};

/// Columns of a block where the library's own order is that of pack_columns(), else 0.
std::int64_t block_columns_of(const ProductShape& shape, const memory::desc& b) {
  using Tag = memory::format_tag;
  for (const auto& [columns, tag] :
       {std::pair(16, Tag::BA16a16b2a), std::pair(32, Tag::BA16a32b2a),
        std::pair(48, Tag::BA16a48b2a), std::pair(64, Tag::BA16a64b2a)}) {
    if (b == memory::desc({shape.depth, shape.b_rows}, shape.type, tag)) return columns;
  }
  return 0;
}

DescribedProduct describe(const ProductShape& shape) {
  const auto [a, b, out] = operands(shape);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (shape.accumulates) {
    dnnl::post_ops add_to_out;
    add_to_out.append_sum(1.0f);
    attributes.set_post_ops(add_to_out);
  }
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc desc(engine(), a, b, out, attributes);
#else
  const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a, b, out), attributes, engine());
#endif
  return {dnnl::matmul(desc), desc.weights_desc(), desc.scratchpad_desc()};
}

/// The products that were used last, of all threads.
// NOTE: the library has such a cache itself, but its key is a description that takes about 20 us to
// make: 2 % of the T=1024 of bench_cpu_bars.
class ProductCache {
 public:
  explicit ProductCache(std::size_t capacity) : capacity_(capacity) {
    dnnl::set_primitive_cache_capacity(0);
  }

  DescribedProduct find(const ProductShape& shape) {
    const std::scoped_lock lock(mutex_);
    if (has_tail(shape)) capacity_ = std::min(capacity_, kCachedProductsWithTails);
    if (const auto found = by_shape_.find(shape); found != by_shape_.end()) {
      by_use_.splice(by_use_.begin(), by_use_, found->second);
      return found->second->product;
    }
    by_use_.push_front({shape, describe(shape)});
    by_shape_.emplace(shape, by_use_.begin());
    while (by_use_.size() > capacity_) {
      by_shape_.erase(by_use_.back().shape);
      by_use_.pop_back();
    }
    return by_use_.front().product;
  }

 private:
  struct Entry {
    ProductShape shape;
    DescribedProduct product;
  };
  std::mutex mutex_;
  std::size_t capacity_;
  std::list<Entry> by_use_;  ///< the last used first
  std::map<ProductShape, std::list<Entry>::iterator> by_shape_;
};

DescribedProduct find_product(const ProductShape& shape) {
  static ProductCache cache(kCachedProducts);
  static ProductCache cache_by_depth(kCachedProductsByDepth);
  static ProductCache cache_packed(kCachedPackedProducts);
  if (shape.b_is_packed) return cache_packed.find(shape);
  return is_by_depth(shape) ? cache_by_depth.find(shape) : cache.find(shape);
}

}  // namespace

LibraryProduct::LibraryProduct(const ProductShape& shape) : shape_(shape) {
  DescribedProduct described = find_product(shape);
  const Operands described_as = operands(shape);
  if (shape.b_is_packed) block_columns_ = block_columns_of(shape, described.b);
  product_ = std::move(described.product);
  scratch_desc_ = described.scratch;
  a_ = memory(described_as.a, engine(), DNNL_MEMORY_NONE);
  b_ = memory(described.b, engine(), DNNL_MEMORY_NONE);
  out_ = memory(described_as.out, engine(), DNNL_MEMORY_NONE);
  if (fits_scratch()) scratch_ = memory(scratch_desc_, engine(), DNNL_MEMORY_NONE);
}

bool LibraryProduct::fits_scratch() const {
  return scratch_desc_.get_size() <= static_cast<std::size_t>(kCpuLibraryScratchBytes);
}

void LibraryProduct::run(const void* a, const void* b, float* out, void* scratch) {
  a_.set_data_handle(const_cast<void*>(a));
  b_.set_data_handle(const_cast<void*>(b));
  out_.set_data_handle(out);
  if (fits_scratch()) {
    scratch_.set_data_handle(scratch);
  } else {
    static std::once_flag once;
    std::call_once(once, [&] {
      log(LogLevel::kWarning, concat("the matrix library asks for ", scratch_desc_.get_size(),
                                     " bytes of scratch; the memory plan has ",
                                     kCpuLibraryScratchBytes, ": it is allocated at every call"));
    });
  }
  dnnl::stream& stream = stream_of_this_thread();
  product_.execute(
      stream, {{DNNL_ARG_SRC, a_},
               {DNNL_ARG_WEIGHTS, b_},
               {DNNL_ARG_DST, out_},
               {DNNL_ARG_SCRATCHPAD, fits_scratch() ? scratch_ : memory(scratch_desc_, engine())}});
  stream.wait();
}

LibraryProduct& product_of(const ProductShape& shape) {
  // NOTE: the slabs of an expert follow one another and mostly have one shape.
  thread_local LibraryProduct last;
  if (last.shape() != shape) last = LibraryProduct(shape);
  return last;
}

}  // namespace distmoe::cpu
