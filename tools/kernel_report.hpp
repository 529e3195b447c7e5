// SPDX-License-Identifier: Apache-2.0
//
// What `distmoe explain-kernels` prints. docs/command-line.md defines the JSON keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/cuda/select/balanced_call.hpp"
#include "backend/cuda/select/few_rows_choice.hpp"
#include "backend/cuda/select/kernel_choice.hpp"

namespace distmoe::tools {

/// One call of T tokens on every rank.
struct ExplainedCall {
  cuda::BalancedRows rows;
  cuda::NotFew not_few = cuda::NotFew::kNo;        ///< why it is not made in one launch
  std::vector<cuda::FewRowsCandidate> few_rows{};  ///< where it is: tiles, the chosen ones first
  std::optional<std::int64_t> most_few_rows{};     ///< of more, the grouped products are made
  // Where it is not:
  bool starts_w2_early = false;
  std::vector<cuda::ProductLoad> products{};
  std::vector<cuda::NamedLaunch> launches{};
};

struct ExplainedKernels {
  std::string title;  ///< of the model or checkpoint; empty without
  cuda::ChoiceInputs inputs;
  cuda::ContextChoice choice;
  std::int64_t rank = 0;  ///< whose calls they are
  std::vector<ExplainedCall> calls{};
};

/// One call for each of `tokens`, of a context that takes the most of them. Throws as the choice
/// does.
ExplainedKernels explain_kernels(std::string title, const cuda::ChoiceInputs& inputs,
                                 const std::vector<std::int64_t>& tokens);

/// Both end with a newline.
std::string text_of(const ExplainedKernels& kernels);
std::string json_of(const ExplainedKernels& kernels);

}  // namespace distmoe::tools
