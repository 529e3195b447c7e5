// SPDX-License-Identifier: Apache-2.0
#include "core/failing_allocations.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <string>

#include "distmoe/error.hpp"

namespace {

using distmoe::testing::countdown;

bool is_refused() {
  return countdown.load(std::memory_order_relaxed) >= 0 && countdown.fetch_sub(1) == 0;
}

void* allocate(std::size_t size, std::size_t alignment) noexcept {
  if (is_refused()) return nullptr;
  // NOTE: aligned_alloc asks for a multiple.
  const std::size_t bytes = (size + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, bytes > 0 ? bytes : alignment);
}

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* memory = allocate(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

constexpr std::size_t kUsual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

// NOTE: every form: AddressSanitizer brings those that are missing, and frees what it allocated.
void* operator new(std::size_t size) { return allocate_or_throw(size, kUsual); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, kUsual); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, kUsual);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return allocate(size, kUsual);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace distmoe::testing {

std::int64_t num_errors(const char* what, const std::function<void(const Act&)>& attempt) {
  for (std::int64_t nth = 0; nth < 100000; ++nth) {
    bool is_reached = false;
    attempt([&](const std::function<void()>& body) {
      std::string ended = "well";
      countdown = nth;
      try {
        body();
      } catch (const Error& error) {
        const bool is_left = countdown.exchange(-1) >= 0;
        if (is_left || error.code() != ErrorCode::kOutOfMemory) ended = error.what();
      } catch (const std::exception& error) {
        countdown = -1;
        ended = error.what();
      }
      // What was refused and went unnoticed is as good as an error.
      is_reached = countdown.exchange(-1) < 0;
      EXPECT_EQ(ended, "well") << what << ", allocation " << nth;
    });
    if (!is_reached || ::testing::Test::HasFailure()) return nth;
  }
  ADD_FAILURE() << what << " never had its memory";
  return 0;
}

void expect_errors(const char* what, const std::function<void(const Act&)>& attempt) {
  EXPECT_GT(num_errors(what, attempt), 0) << what << " allocates nothing: nothing was tried";
}

}  // namespace distmoe::testing
