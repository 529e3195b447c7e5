// SPDX-License-Identifier: Apache-2.0
//
// The steps of calls on every rank as a file for trace viewers (Perfetto, chrome://tracing).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace distmoe::tools {

/// One call of one rank, in microseconds after the earliest rank began.
struct RankTrace {
  int rank = 0;
  double begin_us = 0.0;
  /// Of each step and of the end of the last, after begin_us; one more than there are names.
  std::vector<double> step_us;
  std::int64_t rows = 0;  ///< that the rank received
};

struct TraceFile {
  std::string title;  ///< of the process of the whole
  std::vector<const char*> step_names;
  std::vector<RankTrace> ranks;
  std::vector<std::string> remarks;  ///< name=value facts of the call
};

/// The JSON array format of the Trace Event Format: a thread a rank, an event a step.
std::string json_of(const TraceFile& trace);

}  // namespace distmoe::tools
