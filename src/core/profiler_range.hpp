// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace distmoe {

/// Names what this thread does for a profiler: NVTX ranges of the domain "distmoe" in a build with
/// CUDA, which cost nanoseconds where no profiler listens; nothing elsewhere.
class ProfilerRange {
 public:
  ProfilerRange() = default;
  ~ProfilerRange() { end(); }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

  /// Ends the range before, if there is one. `name` is copied.
  void begin(const char* name);
  void end();

 private:
  bool is_open_ = false;
};

}  // namespace distmoe
