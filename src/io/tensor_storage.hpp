// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace distmoe {

/// Memory of a tensor that the loader owns, aligned to 64 bytes and not initialised.
class TensorStorage {
 public:
  TensorStorage() = default;
  /// Throws out_of_memory, naming `what` and the bytes.
  TensorStorage(std::size_t num_bytes, std::string_view what);

  /// Null where there is no byte. The address survives a move.
  std::byte* data() const noexcept { return data_.get(); }
  std::size_t num_bytes() const noexcept { return num_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t num_bytes_ = 0;
};

}  // namespace distmoe
