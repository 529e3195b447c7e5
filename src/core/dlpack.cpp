// SPDX-License-Identifier: Apache-2.0
#include "distmoe/dlpack.hpp"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "core/check.hpp"
#include "core/checked_math.hpp"

namespace distmoe {
namespace {

struct TypeCode {
  DType dtype;
  std::uint8_t code;
  std::uint8_t bits;
};

// NOTE: DLPack 0.6 knows no bool and no 8-bit float; bool is code 6 in every later version.
constexpr std::uint8_t kBoolCode = 6;
constexpr std::array kTypeCodes = {
    TypeCode{DType::kBF16, kDLBfloat, 16}, TypeCode{DType::kF16, kDLFloat, 16},
    TypeCode{DType::kF32, kDLFloat, 32},   TypeCode{DType::kF64, kDLFloat, 64},
    TypeCode{DType::kI16, kDLInt, 16},     TypeCode{DType::kI32, kDLInt, 32},
    TypeCode{DType::kI64, kDLInt, 64},     TypeCode{DType::kU8, kDLUInt, 8},
    TypeCode{DType::kU16, kDLUInt, 16},    TypeCode{DType::kU32, kDLUInt, 32},
    TypeCode{DType::kU64, kDLUInt, 64},    TypeCode{DType::kBool, kBoolCode, 8},
};

/// As frameworks name it: "complex64".
std::string name_of(const DLDataType& type) {
  // In the order of the codes that DLPack had in version 1.1.
  constexpr std::array kNames = {"int",
                                 "uint",
                                 "float",
                                 "opaque",
                                 "bfloat",
                                 "complex",
                                 "bool",
                                 "float8_e3m4",
                                 "float8_e4m3",
                                 "float8_e4m3b11fnuz",
                                 "float8_e4m3fn",
                                 "float8_e4m3fnuz",
                                 "float8_e5m2",
                                 "float8_e5m2fnuz",
                                 "float8_e8m0fnu",
                                 "float6_e2m3fn",
                                 "float6_e3m2fn",
                                 "float4_e2m1fn"};
  if (type.code >= kNames.size()) {
    return concat("DLPack's type ", int{type.code}, " of ", int{type.bits}, " bits");
  }
  const std::string name = kNames[type.code];
  const bool has_bits = name.find('_') != std::string::npos || name == "bool";
  return has_bits ? name : concat(name, int{type.bits});
}

DType dtype_of(const DLDataType& type) {
  DISTMOE_CHECK(type.lanes == 1, kUnsupported, "a DLPack tensor has vector elements of ",
                type.lanes, " lanes; only 1 is supported");
  for (const TypeCode& known : kTypeCodes) {
    if (known.code == type.code && known.bits == type.bits) return known.dtype;
  }
  throw_error(ErrorCode::kUnsupported, concat("no distmoe type for elements of ", name_of(type)));
}

Device device_of(const DLDevice& device) {
  if (device.device_type == kDLCPU || device.device_type == kDLCUDAHost) return {};
  DISTMOE_CHECK(device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged, kUnsupported,
                "a DLPack tensor lives on device type ", static_cast<int>(device.device_type),
                "; CPU and CUDA are supported");
  return {DeviceType::kCuda, device.device_id};
}

/// A DLManagedTensor with room for its shape and strides; the deleter frees it whole.
struct ExportedTensor {
  DLManagedTensor managed{};
  std::array<std::int64_t, kMaxTensorRank> shape{};
  std::array<std::int64_t, kMaxTensorRank> strides{};
};

}  // namespace

TensorView from_dlpack(const DLManagedTensor& tensor) {
  const DLTensor& source = tensor.dl_tensor;
  DISTMOE_CHECK(source.ndim >= 1 && source.ndim <= kMaxTensorRank, kInvalidArgument,
                "a DLPack tensor has ", source.ndim, " dimensions; 1 to ", kMaxTensorRank,
                " are supported");
  TensorView view;
  view.dtype = dtype_of(source.dtype);
  view.device = device_of(source.device);
  view.rank = source.ndim;
  if (source.data != nullptr) view.data = static_cast<std::byte*>(source.data) + source.byte_offset;
  std::int64_t stride = 1;
  for (int dim = source.ndim - 1; dim >= 0; --dim) {
    DISTMOE_CHECK(source.shape[dim] >= 0, kInvalidArgument, "a DLPack tensor has extent ",
                  source.shape[dim], " in dimension ", dim);
    view.shape[dim] = source.shape[dim];
    view.strides[dim] = source.strides != nullptr ? source.strides[dim] : stride;
    stride = checked_mul(stride, std::max<std::int64_t>(source.shape[dim], 1));
  }
  checked_mul(stride, static_cast<std::int64_t>(size_of(view.dtype)));
  return view;
}

DLManagedTensor* to_dlpack(const TensorView& view) {
  auto exported = std::make_unique<ExportedTensor>();
  exported->shape = view.shape;
  exported->strides = view.strides;
  DLTensor& target = exported->managed.dl_tensor;
  target.data = view.data;
  target.device = {view.device.type == DeviceType::kCpu ? kDLCPU : kDLCUDA, view.device.index};
  target.ndim = view.rank;
  target.dtype = {kDLUInt, 8, 1};
  for (const TypeCode& known : kTypeCodes) {
    if (known.dtype == view.dtype) target.dtype = {known.code, known.bits, 1};
  }
  target.shape = exported->shape.data();
  target.strides = exported->strides.data();
  target.byte_offset = 0;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<ExportedTensor*>(self->manager_ctx);
  };
  return &exported.release()->managed;
}

}  // namespace distmoe
