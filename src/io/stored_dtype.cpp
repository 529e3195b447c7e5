// SPDX-License-Identifier: Apache-2.0
#include "io/stored_dtype.hpp"

#include <array>

#include "core/check.hpp"

namespace distmoe {
namespace {

struct StoredType {
  std::string_view name;
  std::int64_t bits;
  std::optional<DType> dtype;
};

constexpr std::array<StoredType, 20> kStoredTypes = {{
    {"BF16", 16, DType::kBF16},     {"F16", 16, DType::kF16},       {"F32", 32, DType::kF32},
    {"F64", 64, DType::kF64},       {"I16", 16, DType::kI16},       {"I32", 32, DType::kI32},
    {"I64", 64, DType::kI64},       {"U8", 8, DType::kU8},          {"U16", 16, DType::kU16},
    {"U32", 32, DType::kU32},       {"U64", 64, DType::kU64},       {"BOOL", 8, DType::kBool},
    {"F8_E4M3", 8, DType::kF8E4M3}, {"F8_E5M2", 8, DType::kF8E5M2}, {"F8_E8M0", 8, DType::kF8E8M0},
    {"I8", 8, std::nullopt},        {"C64", 64, std::nullopt},      {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},   {"F6_E3M2", 6, std::nullopt},
}};

const StoredType* find_type(std::string_view name) {
  for (const StoredType& type : kStoredTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

}  // namespace

std::optional<DType> dtype_of_stored_name(std::string_view name) {
  const StoredType* type = find_type(name);
  return type == nullptr ? std::nullopt : type->dtype;
}

std::optional<std::int64_t> bits_of_stored_name(std::string_view name) {
  const StoredType* type = find_type(name);
  return type == nullptr ? std::nullopt : std::optional(type->bits);
}

std::string_view stored_name_of(DType dtype) {
  for (const StoredType& type : kStoredTypes) {
    if (type.dtype == dtype) return type.name;
  }
  throw_error(ErrorCode::kInternal, concat("no stored name of type ", to_string(dtype)));
}

}  // namespace distmoe
