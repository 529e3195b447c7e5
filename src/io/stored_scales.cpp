// SPDX-License-Identifier: Apache-2.0
//
// NOTE: the bytes of a file are aligned to nothing, hence memcpy where an element is wider than a
// byte.
#include "io/stored_scales.hpp"

#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/mxfp4.hpp"

namespace distmoe {

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

void check_scale_bytes(StoredFormat format, std::span<const std::byte> scales,
                       const std::function<std::string(std::size_t)>& describe_place) {
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const auto byte = std::to_integer<int>(scales[i]);
    switch (format) {
      case StoredFormat::kMxfp4:
        DISTMOE_CHECK(byte <= kMxfp4MaxScaleByte, kIo, describe_place(i), " is byte ", byte,
                      "; legal are 0 to ", int{kMxfp4MaxScaleByte},
                      " (255 is NaN, the others exceed BF16)");
        break;
      case StoredFormat::kMxfp8:
        DISTMOE_CHECK(byte != kE8M0NaN.bits, kIo, describe_place(i), " is byte ", byte,
                      ", NaN; legal are 0 to 254");
        break;
      case StoredFormat::kNvfp4:
        DISTMOE_CHECK(byte < kE4M3NaN.bits, kIo, describe_place(i), " is byte ", byte,
                      "; legal are 0 to 126 (127 and 255 are NaN, the others negative)");
        break;
      case StoredFormat::kBF16:
      case StoredFormat::kFp8Blocks:
        throw_error(ErrorCode::kInternal, "scales of this format are no bytes");
    }
  }
}

std::span<const std::byte> read_scale_bytes(const MatrixRef& matrix, std::int64_t expert) {
  const std::vector<std::int64_t>& shape = matrix.scales.tensor->shape;
  const bool is_fused = shape.size() == 3;
  const std::span<const std::byte> scales =
      is_fused ? slice_of_expert(matrix.scales, expert) : matrix.scales.tensor->data;
  const auto cols = static_cast<std::size_t>(shape.back());
  check_scale_bytes(matrix.format, scales, [&](std::size_t i) {
    return concat("scale [", is_fused ? concat(expert, ", ") : "", i / cols, ", ", i % cols,
                  "] of ", matrix.scales.describe(), ", expert ", expert, ',');
  });
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
