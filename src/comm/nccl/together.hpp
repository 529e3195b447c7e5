// SPDX-License-Identifier: Apache-2.0
//
// A step that every rank takes and that may fail on one of them: all of them throw then.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/agreement.hpp"
#include "core/current_error.hpp"

namespace distmoe::nccl {

template <typename Body>
void do_together(Communicator& host, Communicator::Timeout timeout, std::string_view what,
                 const Body& body) {
  std::optional<Error> error;
  try {
    body();
  } catch (...) {
    error = current_error(what);
  }
  std::vector<Refusal> refusals(static_cast<std::size_t>(host.size()));
  all_gather(host, to_refusal(error), std::span(refusals), timeout);
  throw_if_refused(refusals, host.rank(), error, what);
}

}  // namespace distmoe::nccl
