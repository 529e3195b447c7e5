// SPDX-License-Identifier: Apache-2.0
//
// How ranks agree before they depend on each other: each publishes a record of fixed size, and a
// rank that cannot go on says so in its record, so that all of them fail in the same call.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "distmoe/communicator.hpp"
#include "distmoe/error.hpp"
#include "layout/refusal.hpp"

namespace distmoe {

/// What every rank of the group throws in the same call, so that all of them stay in step.
class AgreedError final : public Error {
 public:
  using Error::Error;
};

/// The refusal that reports `error`, or none.
Refusal to_refusal(const std::optional<Error>& error);

/// Throws AgreedError on every rank alike if any record refuses: the rank itself its own `error`,
/// its peers an error of the same code that names the lowest refusing rank and repeats its message.
/// `what` is the thing that was refused: "call 3".
void throw_if_refused(std::span<const Refusal> refusals, int rank,
                      const std::optional<Error>& error, std::string_view what);

/// Every rank's `bytes` long record, in rank order, into `all` (size() * bytes).
void all_gather_bytes(Communicator& communicator, std::span<const std::byte> mine,
                      std::span<std::byte> all, Communicator::Timeout timeout);

/// Every rank's record, in rank order.
template <typename Record>
void all_gather(Communicator& communicator, const Record& mine, std::span<Record> all,
                Communicator::Timeout timeout) {
  static_assert(std::is_trivially_copyable_v<Record>);
  all_gather_bytes(communicator, std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(all),
                   timeout);
}

}  // namespace distmoe
