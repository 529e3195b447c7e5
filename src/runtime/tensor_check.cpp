// SPDX-License-Identifier: Apache-2.0
#include "runtime/tensor_check.hpp"

#include "core/check.hpp"
#include "runtime/context_impl.hpp"

namespace distmoe {
namespace {

std::string shape_text(std::initializer_list<std::int64_t> shape) {
  std::string text;
  for (const std::int64_t extent : shape) {
    text += concat(text.empty() ? "[" : ", ", extent);
  }
  return text + "]";
}

}  // namespace

void check_shape(const char* name, const TensorView& tensor,
                 std::initializer_list<std::int64_t> shape) {
  bool is_equal = tensor.rank == static_cast<int>(shape.size());
  int dim = 0;
  for (const std::int64_t extent : shape) is_equal = is_equal && tensor.shape[dim++] == extent;
  DISTMOE_CHECK(is_equal, kInvalidArgument, name, " must have shape ", shape_text(shape), ", got ",
                tensor.describe());
}

void check_dtype(const char* name, const TensorView& tensor, DType first, DType second) {
  DISTMOE_CHECK(tensor.dtype == first || tensor.dtype == second, kInvalidArgument, name,
                " must be ", to_string(first), first == second ? "" : " or ",
                first == second ? "" : to_string(second), ", got ", tensor.describe());
}

void check_memory(const ContextImpl& context, const char* name, const TensorView& tensor) {
  const Device device = context.device();
  DISTMOE_CHECK(tensor.device == device, kInvalidArgument, name, " must be in ",
                device.type == DeviceType::kCpu
                    ? "host memory for a context on the CPU"
                    : concat("the memory of ", to_string(device), ", where its context is"),
                ", got ", tensor.describe());
  DISTMOE_CHECK(tensor.num_elements() == 0 || tensor.data != nullptr, kInvalidArgument, name,
                " has a null data pointer for ", tensor.describe());
  DISTMOE_CHECK(tensor.num_elements() == 0 ||
                    reinterpret_cast<std::uintptr_t>(tensor.data) % size_of(tensor.dtype) == 0,
                kInvalidArgument, name, " is not aligned to its elements of ",
                size_of(tensor.dtype), " bytes: ", tensor.describe(), " at ", tensor.data);
}

void check_vector_rows(const ContextImpl& context, const char* name, const TensorView& rows) {
  if (context.device().type == DeviceType::kCpu || rows.num_elements() == 0) return;
  constexpr std::int64_t kVectorBytes = 16;
  const auto element_bytes = static_cast<std::int64_t>(size_of(rows.dtype));
  bool is_aligned = reinterpret_cast<std::uintptr_t>(rows.data) % kVectorBytes == 0;
  for (int dim = 0; dim + 1 < rows.rank; ++dim) {
    is_aligned = is_aligned &&
                 (rows.shape[dim] == 1 || rows.strides[dim] * element_bytes % kVectorBytes == 0);
  }
  DISTMOE_CHECK(is_aligned, kUnsupported, "rows of ", name,
                " must start at multiples of 16 bytes on CUDA, got ", rows.describe(), " at ",
                rows.data);
}

void check_weight_strides(const ContextImpl& context, const char* name, const TensorView& weights) {
  if (context.device().type == DeviceType::kCpu || weights.num_elements() == 0) return;
  constexpr std::int64_t kStrideLimitBytes = std::int64_t{1} << 40;
  const auto element_bytes = static_cast<std::int64_t>(size_of(weights.dtype));
  for (int dim = 0; dim + 1 < weights.rank; ++dim) {
    DISTMOE_CHECK(
        weights.shape[dim] == 1 ||
            (weights.strides[dim] >= 0 && weights.strides[dim] < kStrideLimitBytes / element_bytes),
        kUnsupported, "strides of ", name, " must be 0 to ", kStrideLimitBytes / element_bytes - 1,
        " elements on CUDA, got ", weights.describe());
  }
}

void check_row_major(const char* name, const TensorView& tensor) {
  const int last = tensor.rank - 1;
  DISTMOE_CHECK(tensor.num_elements() == 0 || tensor.shape[last] == 1 || tensor.strides[last] == 1,
                kInvalidArgument, name, " needs stride 1 in its last dimension, got ",
                tensor.describe());
}

void check_contiguous(const char* name, const TensorView& tensor) {
  DISTMOE_CHECK(tensor.is_contiguous(), kInvalidArgument, name, " must be contiguous, got ",
                tensor.describe());
}

void check_input_rows(const ContextImpl& context, const char* name, const TensorView& rows,
                      std::int64_t tokens) {
  check_shape(name, rows, {tokens, context.config().hidden_dim});
  check_dtype(name, rows, DType::kBF16, DType::kBF16);
  check_memory(context, name, rows);
  check_row_major(name, rows);
  check_vector_rows(context, name, rows);
}

void check_output_rows(const ContextImpl& context, const char* name, const TensorView& rows,
                       std::int64_t tokens) {
  check_input_rows(context, name, rows, tokens);
  const std::int64_t width = context.config().hidden_dim;
  DISTMOE_CHECK(tokens <= 1 || rows.strides[0] >= width || rows.strides[0] <= -width,
                kInvalidArgument, "rows of ", name, " overlap: ", rows.describe());
}

}  // namespace distmoe
