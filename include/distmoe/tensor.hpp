// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "distmoe/export.hpp"

namespace distmoe {

enum class DType : std::uint8_t {
  kBF16,
  kF16,
  kF32,
  kF64,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64,
  kBool,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
};

/// "bf16", "int32", "f8_e4m3", ...
DISTMOE_EXPORT const char* to_string(DType dtype) noexcept;
/// Bytes of one element.
DISTMOE_EXPORT std::size_t size_of(DType dtype) noexcept;

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  ///< CUDA device ordinal; 0 on the CPU
  bool operator==(const Device&) const = default;
};

/// "cpu", "cuda:1".
DISTMOE_EXPORT std::string to_string(Device device);

inline constexpr int kMaxTensorRank = 4;

/// A view of memory that the caller owns: it never allocates, frees or copies. `data` may be null
/// where the shape has no element. Strides count elements, not bytes.
struct DISTMOE_EXPORT TensorView {
  void* data = nullptr;
  DType dtype = DType::kBF16;
  Device device{};
  /// Number of dimensions, up to kMaxTensorRank; 0 with null data means "not given".
  int rank = 0;
  std::array<std::int64_t, kMaxTensorRank> shape{};
  std::array<std::int64_t, kMaxTensorRank> strides{};

  TensorView() = default;
  /// A contiguous (row-major) view. Throws invalid_argument for more than kMaxTensorRank
  /// dimensions, a negative extent or an element count beyond 64 bits.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
             Device device = {});
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
             Device device = {});
  /// A shape without memory: an empty tensor.
  TensorView(std::nullptr_t, DType dtype, std::initializer_list<std::int64_t> shape,
             Device device = {})
      : TensorView(static_cast<void*>(nullptr), dtype, shape, device) {}
  /// A view with explicit strides, as many as dimensions.
  static TensorView strided(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                            std::initializer_list<std::int64_t> strides, Device device = {});

  bool is_given() const noexcept { return rank != 0; }
  /// A view of any other rank has no elements, isn't contiguous and is refused by every call.
  bool has_legal_rank() const noexcept;
  std::int64_t num_elements() const noexcept;
  std::size_t num_bytes() const noexcept;
  /// Row-major without gaps. Strides of extents 0 and 1 do not matter.
  bool is_contiguous() const noexcept;

  /// "bf16 [512, 256]", with the strides where the view is not contiguous.
  std::string describe() const;
};

}  // namespace distmoe
