// SPDX-License-Identifier: Apache-2.0
//
// What DLPack 1 has beyond the 0.6 of Debian's header, as its specification lays it out.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

namespace distmoe::python {

constexpr std::uint32_t kDlpackMajorVersion = 1;
constexpr std::uint64_t kReadOnlyFlag = 1;

struct DlpackVersion {
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
};

struct VersionedTensor {
  DlpackVersion version;
  void* manager_ctx = nullptr;
  void (*deleter)(VersionedTensor*) = nullptr;
  std::uint64_t flags = 0;
  DLTensor dl_tensor{};
};

/// The table that a type offers as __dlpack_c_exchange_api__.
struct ExchangeTable {
  DlpackVersion version;
  ExchangeTable* previous = nullptr;
  void* allocate = nullptr;
  void* managed_from_object = nullptr;
  void* managed_to_object = nullptr;
  int (*tensor_from_object)(void* object, DLTensor* out) = nullptr;  // null where it has none
  void* current_stream = nullptr;
};

}  // namespace distmoe::python
