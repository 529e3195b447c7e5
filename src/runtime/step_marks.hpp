// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "core/profiler_range.hpp"

namespace distmoe {

/// Says which step a sequence takes next: to its observer, and to a profiler by the step's name.
/// `Step` has a last value kEnd and a to_string(Step).
template <typename Step>
class StepMarks {
 public:
  /// `observer` may be null and outlives this.
  explicit StepMarks(const std::function<void(Step)>* observer) : observer_(observer) {}
  void operator()(Step next) {
    next == Step::kEnd ? range_.end() : range_.begin(to_string(next));
    if (observer_ != nullptr) (*observer_)(next);
  }

 private:
  const std::function<void(Step)>* observer_;
  ProfilerRange range_;
};

}  // namespace distmoe
