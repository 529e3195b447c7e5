// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace distmoe::testing {

/// Address space without memory: pages, of zeros, come into being where they are touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~SparseMemory() {
    if (is_given()) munmap(base_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool is_given() const { return base_ != MAP_FAILED; }
  std::byte* base() const { return static_cast<std::byte*>(base_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(base_);
  }

 private:
  std::size_t bytes_;
  void* base_;
};

}  // namespace distmoe::testing
