// SPDX-License-Identifier: Apache-2.0
#include "distmoe/tensor.hpp"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/check.hpp"
#include "core/checked_math.hpp"

namespace distmoe {
namespace {

struct DTypeFacts {
  const char* name;
  std::size_t bytes;
};

constexpr DTypeFacts facts_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return {"bf16", 2};
    case DType::kF16: return {"f16", 2};
    case DType::kF32: return {"f32", 4};
    case DType::kF64: return {"f64", 8};
    case DType::kI16: return {"int16", 2};
    case DType::kI32: return {"int32", 4};
    case DType::kI64: return {"int64", 8};
    case DType::kU8: return {"uint8", 1};
    case DType::kU16: return {"uint16", 2};
    case DType::kU32: return {"uint32", 4};
    case DType::kU64: return {"uint64", 8};
    case DType::kBool: return {"bool", 1};
    case DType::kF8E4M3: return {"f8_e4m3", 1};
    case DType::kF8E5M2: return {"f8_e5m2", 1};
    case DType::kF8E8M0: return {"f8_e8m0", 1};
  }
  return {"unknown", 0};
}

/// A shape that nobody has checked may have more elements than 64 bits count.
std::int64_t saturated_mul(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

TensorView make_view(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                     Device device) {
  DISTMOE_CHECK(shape.size() <= kMaxTensorRank, kInvalidArgument, "a tensor has ", shape.size(),
                " dimensions; at most ", kMaxTensorRank, " are supported");
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    DISTMOE_CHECK(view.shape[dim] >= 0, kInvalidArgument, "a tensor has extent ", view.shape[dim],
                  " in dimension ", dim);
    view.strides[dim] = stride;
    stride = checked_mul(stride, std::max<std::int64_t>(view.shape[dim], 1));
  }
  checked_mul(stride, static_cast<std::int64_t>(size_of(dtype)));
  return view;
}

}  // namespace

const char* to_string(DType dtype) noexcept { return facts_of(dtype).name; }

std::size_t size_of(DType dtype) noexcept { return facts_of(dtype).bytes; }

std::string to_string(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : concat("cuda:", device.index);
}

TensorView::TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       Device device)
    : TensorView(make_view(data, dtype, shape, device)) {}

TensorView::TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                       Device device)
    : TensorView(make_view(const_cast<void*>(data), dtype, shape, device)) {}

TensorView TensorView::strided(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                               std::initializer_list<std::int64_t> strides, Device device) {
  TensorView view = make_view(data, dtype, shape, device);
  DISTMOE_CHECK(strides.size() == shape.size(), kInvalidArgument, "a tensor of ", shape.size(),
                " dimensions was given ", strides.size(), " strides");
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

bool TensorView::has_legal_rank() const noexcept { return rank >= 0 && rank <= kMaxTensorRank; }

std::int64_t TensorView::num_elements() const noexcept {
  if (rank == 0 || !has_legal_rank()) return 0;
  std::int64_t count = 1;
  for (int dim = 0; dim < rank; ++dim) count = saturated_mul(count, shape[dim]);
  return count;
}

std::size_t TensorView::num_bytes() const noexcept {
  return static_cast<std::size_t>(num_elements()) * size_of(dtype);
}

bool TensorView::is_contiguous() const noexcept {
  if (!has_legal_rank()) return false;
  if (num_elements() == 0) return true;
  std::int64_t expected = 1;
  for (int dim = rank - 1; dim >= 0; --dim) {
    if (shape[dim] != 1 && strides[dim] != expected) return false;
    expected = saturated_mul(expected, shape[dim]);
  }
  return true;
}

std::string TensorView::describe() const {
  if (rank == 0) return "nothing";
  if (!has_legal_rank()) {
    return concat(to_string(dtype), " of rank ", rank, ", which is not 0 to ", kMaxTensorRank);
  }
  std::ostringstream text;
  const auto list = [&](const auto& values) {
    for (int dim = 0; dim < rank; ++dim) text << (dim == 0 ? "[" : ", ") << values[dim];
    text << ']';
  };
  text << to_string(dtype) << ' ';
  list(shape);
  if (!is_contiguous()) {
    text << " with strides ";
    list(strides);
  }
  if (device.type != DeviceType::kCpu) text << " on " << to_string(device);
  return text.str();
}

}  // namespace distmoe
