// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_storage.hpp"

#include <new>

#include "core/check.hpp"

namespace distmoe {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

TensorStorage::TensorStorage(std::size_t num_bytes, std::string_view what) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  void* data = ::operator new(num_bytes, kAlignment, std::nothrow);
  DISTMOE_CHECK(data != nullptr, kOutOfMemory, "no memory for ", num_bytes, " bytes of ", what);
  data_.reset(static_cast<std::byte*>(data));
}

void TensorStorage::Free::operator()(std::byte* data) const noexcept {
  ::operator delete(data, kAlignment);
}

}  // namespace distmoe
