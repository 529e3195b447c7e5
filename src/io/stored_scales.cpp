// SPDX-License-Identifier: Apache-2.0
//
// NOTE: the bytes of a file are aligned to nothing, hence memcpy where an element is wider than a
// byte.
#include "io/stored_scales.hpp"

#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "formats/bf16.hpp"
#include "formats/block_scaled.hpp"
#include "runtime/prepared_layout.hpp"

namespace distmoe {
namespace {

/// What the bytes above the largest scale are.
const char* beyond_scales(StoredFormat format) {
  if (format == StoredFormat::kMxfp4) return "255 is NaN, the others exceed BF16";
  return format == StoredFormat::kMxfp8 ? "255 is NaN" : "127 and 255 are NaN, the others negative";
}

}  // namespace

std::span<const std::byte> slice_of_expert(const TensorRef& ref, std::int64_t expert) {
  const auto num_experts = static_cast<std::size_t>(ref.tensor->shape.front());
  const std::size_t num_bytes = ref.tensor->data.size() / num_experts;
  return ref.tensor->data.subspan(static_cast<std::size_t>(expert) * num_bytes, num_bytes);
}

std::vector<float> read_fp8_scales(const TensorRef& ref, std::int64_t expert) {
  const StoredTensor& tensor = *ref.tensor;
  const bool is_bf16 = tensor.dtype == DType::kBF16;
  const std::size_t width = size_of(tensor.known_dtype());
  std::vector<float> scales(tensor.data.size() / width);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    BF16 narrow{};
    std::memcpy(is_bf16 ? static_cast<void*>(&narrow) : &scales[i], &tensor.data[i * width], width);
    if (is_bf16) scales[i] = to_float(narrow);
    const auto cols = static_cast<std::size_t>(tensor.shape[1]);
    DISTMOE_CHECK(std::isfinite(scales[i]), kIo, "scale [", i / cols, ", ", i % cols, "] of ",
                  ref.describe(), ", expert ", expert, ", is ", scales[i],
                  "; scales must be finite");
  }
  return scales;
}

std::span<const std::byte> read_scale_bytes(const MatrixRef& matrix, std::int64_t expert) {
  const std::vector<std::int64_t>& shape = matrix.scales.tensor->shape;
  const bool is_fused = shape.size() == 3;
  const std::span<const std::byte> scales =
      is_fused ? slice_of_expert(matrix.scales, expert) : matrix.scales.tensor->data;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(scales.data());
  const std::uint8_t most = max_scale_byte(precision_of(matrix.format));
  const std::int64_t place = find_scale_above(bytes, std::ssize(scales), most);
  const std::int64_t cols = shape.back();
  DISTMOE_CHECK(place == std::ssize(scales), kIo, "scale [", is_fused ? concat(expert, ", ") : "",
                place / cols, ", ", place % cols, "] of ", matrix.scales.describe(), ", expert ",
                expert, ", is byte ", int{bytes[place]}, "; legal are 0 to ", int{most}, " (",
                beyond_scales(matrix.format), ')');
  return scales;
}

float read_global_scale(const MatrixRef& matrix, std::int64_t expert) {
  float scale = 0.0f;
  std::memcpy(&scale, matrix.global_scale.tensor->data.data(), sizeof(scale));
  DISTMOE_CHECK(std::isfinite(scale) && scale > 0.0f, kIo, "the global scale ",
                matrix.global_scale.describe(), ", expert ", expert, ", is ", scale,
                "; it must be finite and above 0");
  return scale;
}

}  // namespace distmoe
