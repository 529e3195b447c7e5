// SPDX-License-Identifier: Apache-2.0
//
// Brings the outputs of all ranks into the first rank's file, a piece at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "exit_code.hpp"
#include "io/safetensors_writer.hpp"
#include "rank_group.hpp"

namespace distmoe::tools {

/// A tensor whose first extent the ranks share: rank r has parts[r] of it.
struct OutputTensor {
  TensorEntry entry;  ///< of all ranks
  std::vector<std::int64_t> parts;
  std::span<const std::byte> own;
};

class OutputGather {
 public:
  /// Collective; entries and parts are the same on every rank. The first rank writes the tensors to
  /// a temporary file beside `path`; what it cannot write is kept as failure(), since the peers
  /// send all the same.
  void run(RankGroup& group, const std::filesystem::path& path,
           std::span<const OutputTensor> tensors);

  /// On the first rank: the file appears under its name, or failure() says why not. Nothing to do
  /// elsewhere.
  void commit();
  const Failure& failure() const noexcept { return failure_; }
  /// Removes what was not committed.
  void discard() { file_.reset(); }

 private:
  void gather(RankGroup& group, const OutputTensor& tensor);
  /// Runs `step` unless an earlier one failed.
  void write(const std::function<void()>& step);

  std::unique_ptr<SafetensorsWriter> file_;
  Failure failure_;
};

}  // namespace distmoe::tools
