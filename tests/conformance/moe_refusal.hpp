// SPDX-License-Identifier: Apache-2.0
//
// What a call that must fail does: the error of every rank, as a value, and the law that nothing
// else happened.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "conformance/moe_call.hpp"
#include "conformance/moe_case.hpp"
#include "conformance/placed_call.hpp"
#include "distmoe/error.hpp"

namespace distmoe::conformance {

/// How a call ended.
struct Outcome {
  std::optional<ErrorCode> code;
  std::string message;
  double seconds = 0;
};
Outcome outcome_of(const std::function<void()>& call);
/// Fails the test unless the outcome is that error and has all the words.
void expect_error(const Outcome& outcome, ErrorCode code, const std::vector<std::string>& words);

/// The arguments of one rank's call, to be spoilt.
struct Arguments {
  RankCall packed;
  TensorView y;

  void set_id(std::int64_t token, std::int64_t k, std::int64_t id) const;
  void call(Context& context) const {
    call_experts(context, packed, {packed.input, packed.weights, y});
  }
};

/// One way to break the contract.
struct Misuse {
  std::string name;
  std::function<void(Arguments&)> spoil;
  std::vector<std::string> words;  ///< of the message, on every rank
  CallForm form = {};
  bool is_value = false;  ///< of a tensor's element: found where the tensor is
};

/// Four tokens a rank.
MoeShape misuse_shape(const MoeCase& moe_case);

/// On one context, for every misuse: one rank (another each time) spoils its arguments; every rank
/// gets invalid_argument in that call, with the rank and the words; y is that of a failed call; and
/// the next correct call gives the bits of a fresh context. Where calls do not ask the communicator
/// the peers of a host that refuses hear its rank alone.
void expect_all_refused(const MoeCase& moe_case, const std::vector<Misuse>& misuses);

}  // namespace distmoe::conformance
