// SPDX-License-Identifier: Apache-2.0
//
// Invariant: inference dispatches a row of a block-scaled precision as its codes, factor and
// scales, packed, each row at a multiple of 16 bytes; training, and MXFP4, whose weights alone are
// codes, dispatch it as the BF16 that it is. What comes back is BF16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "conformance/coded_values.hpp"
#include "conformance/moe_gradients.hpp"
#include "conformance/moe_runner.hpp"
#include "plan/option_names.hpp"

namespace distmoe::conformance {
namespace {

using Bytes = std::vector<std::byte>;

/// Keeps what this rank sends to its only peer, exchange by exchange.
class RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::string_view name() const noexcept override { return "recording"; }
  void alltoallv(std::span<const std::span<const std::byte>> send,
                 std::span<const std::span<std::byte>> recv, Timeout timeout) override {
    const auto to_peer = send[static_cast<std::size_t>(1 - rank())];
    sent.emplace_back(to_peer.begin(), to_peer.end());
    inner_->alltoallv(send, recv, timeout);
  }
  void barrier(Timeout timeout) override { inner_->barrier(timeout); }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }

  std::vector<Bytes> sent;

 private:
  std::shared_ptr<Communicator> inner_;
};

constexpr std::int64_t kTokens = 5;  // of a rank
constexpr std::int64_t kWidth = 96;  // 3 scales of MXFP8, 6 of NVFP4: neither fills 16 bytes

/// Every token has both its routes at the other rank: it crosses once.
MoeProblem problem_of(std::uint64_t seed) {
  MoeProblem problem = make_problem({.num_tokens = 2 * kTokens,
                                     .hidden_dim = kWidth,
                                     .intermediate_dim = 32,
                                     .num_experts = 4,
                                     .top_k = 2},
                                    RoutePattern::kDistinct, seed);
  for (std::size_t route = 0; route < problem.ids.size(); ++route) {
    const bool is_of_rank_0 = route < problem.ids.size() / 2;
    problem.ids[route] = (is_of_rank_0 ? 2 : 0) + static_cast<std::int64_t>(route % 2);
  }
  return problem;
}

/// What the row of a token is on its way, without the gap behind it.
Bytes packed(const MoeProblem& problem, std::int64_t token, Precision precision) {
  const BF16* row = problem.x.data() + token * kWidth;
  const std::vector<double> values = [&] {
    std::vector<double> all;
    for (std::int64_t i = 0; i < kWidth; ++i) all.push_back(to_float(row[i]));
    return all;
  }();
  const bool is_nvfp4 = precision == Precision::kNVFP4;
  const CodedValues coded = is_nvfp4 ? nvfp4_values(values, {1, kWidth}, false)
                                     : mxfp8_values(values, {1, kWidth}, 1, 32);
  Bytes bytes;
  const auto append = [&](const auto& array) {
    const auto more = std::as_bytes(std::span(array));
    bytes.insert(bytes.end(), more.begin(), more.end());
  };
  append(is_nvfp4 ? packed_pairs(coded.codes) : coded.codes);
  if (is_nvfp4) append(coded.factors);
  append(coded.scales);
  return bytes;
}

/// What both ranks sent, of a call of an inference context or a saving one of a training context.
std::vector<std::vector<Bytes>> messages_of(const MoeProblem& problem, Precision precision,
                                            bool inference) {
  const MoeCase moe_case{.ranks = 2, .precision = precision, .is_prepared = true};
  Config config = config_of(problem, moe_case, {}, kTokens);
  config.inference = inference;
  std::vector<std::vector<Bytes>> sent(2);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& inner) {
    const auto communicator = std::make_shared<RecordingCommunicator>(inner);
    const int rank = inner->rank();
    const RankCall call =
        pack_rank(problem, form_of(moe_case, {}, inference), {kTokens, kTokens}, rank);
    Context context = make_context(config, moe_case, communicator);
    communicator->sent.clear();
    if (inference) {
      call_experts(context, call);
    } else {
      static_cast<void>(call_saving(context, call));
    }
    sent[static_cast<std::size_t>(rank)] = communicator->sent;
  });
  return sent;
}

/// The exchange of the rows of x: the first whose bytes are a row of `row_bytes` for every token.
Bytes rows_of(const std::vector<Bytes>& sent, std::int64_t row_bytes) {
  const auto found = std::ranges::find_if(
      sent, [&](const Bytes& bytes) { return std::ssize(bytes) == kTokens * row_bytes; });
  EXPECT_NE(found, sent.end()) << "no message of " << kTokens << " rows of " << row_bytes;
  return found == sent.end() ? Bytes(static_cast<std::size_t>(kTokens * row_bytes)) : *found;
}

TEST(CodedMessages, OfInferenceArePackedCodes) {
  const MoeProblem problem = problem_of(690);
  for (const auto& [precision, row_bytes] :
       {std::pair(Precision::kMXFP8, std::int64_t{112}), {Precision::kNVFP4, std::int64_t{64}}}) {
    ASSERT_EQ(row_bytes % 16, 0);
    const auto sent = messages_of(problem, precision, true);
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      const Bytes rows = rows_of(sent[static_cast<std::size_t>(rank)], row_bytes);
      for (std::int64_t i = 0; i < kTokens; ++i) {
        const Bytes expected = packed(problem, rank * kTokens + i, precision);
        ASSERT_LE(std::ssize(expected), row_bytes);
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), rows.begin() + i * row_bytes))
            << option_name(precision) << " row " << i << " of rank " << rank;
      }
      // Two results of a token come back, as BF16.
      EXPECT_EQ(std::ssize(sent[static_cast<std::size_t>(rank)].back()), kTokens * 2 * kWidth * 2);
    }
  }
}

TEST(CodedMessages, OfTrainingAndOfMxfp4AreBF16Rows) {
  const MoeProblem problem = problem_of(691);
  for (const auto& [precision, inference] :
       {std::pair(Precision::kMXFP8, false), {Precision::kMXFP4, true}}) {
    const auto sent = messages_of(problem, precision, inference);
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      const Bytes rows = rows_of(sent[static_cast<std::size_t>(rank)], 2 * kWidth);
      const BF16* x = problem.x.data() + rank * kTokens * kWidth;
      EXPECT_EQ(std::memcmp(rows.data(), x, rows.size()), 0) << option_name(precision);
    }
  }
}

}  // namespace
}  // namespace distmoe::conformance
