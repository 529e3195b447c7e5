// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_refusal.hpp"

#include <gtest/gtest.h>

#include "conformance/moe_oracle.hpp"
#include "conformance/moe_runner.hpp"

namespace distmoe::conformance {

Outcome outcome_of(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  Outcome outcome;
  const auto start = Clock::now();
  try {
    call();
  } catch (const Error& error) {
    outcome.code = error.code();
    outcome.message = error.what();
  }
  outcome.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return outcome;
}

void expect_error(const Outcome& outcome, ErrorCode code, const std::vector<std::string>& words) {
  ASSERT_TRUE(outcome.code.has_value()) << "no error where " << to_string(code) << " was due";
  EXPECT_STREQ(to_string(*outcome.code), to_string(code)) << outcome.message;
  for (const std::string& word : words) {
    EXPECT_NE(outcome.message.find(word), std::string::npos)
        << "'" << word << "' is not in: " << outcome.message;
  }
}

void Arguments::set_id(std::int64_t token, std::int64_t k, std::int64_t id) const {
  const TensorView& ids = packed.input.topk_ids_TK;
  const std::int64_t offset = token * ids.strides[0] + k * ids.strides[1];
  if (ids.dtype == DType::kI64) {
    static_cast<std::int64_t*>(ids.data)[offset] = id;
  } else {
    static_cast<std::int32_t*>(ids.data)[offset] = static_cast<std::int32_t>(id);
  }
}

MoeShape misuse_shape(const MoeCase& moe_case) {
  return fit({.num_tokens = 4 * moe_case.ranks,
              .hidden_dim = 12,
              .intermediate_dim = 6,
              .num_experts = 8,
              .top_k = 3},
             moe_case);
}

void expect_all_refused(const MoeCase& moe_case, const std::vector<Misuse>& misuses) {
  const MoeShape shape = misuse_shape(moe_case);
  const BackendContract contract = contract_of(moe_case);
  MoeProblem problem = make_problem(shape, RoutePattern::kMixed, 60);
  add_biases(problem, 61);
  problem.round_scores();
  problem.round_biases();
  const TokenCounts counts = even_split(shape.num_tokens, moe_case.ranks);
  const Config config = config_of(problem, moe_case, {}, 4);
  const std::vector<BF16> expected = run(problem, moe_case);
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    Context context = make_context(config, moe_case, communicator);
    for (std::size_t i = 0; i < misuses.size(); ++i) {
      const Misuse& misuse = misuses[i];
      SCOPED_TRACE(misuse.name);
      const auto wrong_rank = static_cast<int>(i % static_cast<std::size_t>(moe_case.ranks));
      Arguments arguments{pack_rank(problem, misuse.form, counts, communicator->rank()), {}};
      arguments.y = arguments.packed.y_view();
      if (communicator->rank() == wrong_rank) misuse.spoil(arguments);
      const Outcome outcome = outcome_of([&] { arguments.call(context); });
      const bool is_found_by_device = misuse.is_value && !contract.host_waits;
      const bool is_refused_here =
          communicator->rank() == wrong_rank && !is_found_by_device && !contract.host_waits;
      std::vector<std::string> words;
      if (contract.calls_ask_the_communicator || is_refused_here || is_found_by_device) {
        words = misuse.words;
      }
      words.push_back("rank " + std::to_string(wrong_rank));
      words.push_back("call " + std::to_string(2 * i + 1));
      expect_error(outcome, ErrorCode::kInvalidArgument, words);
      EXPECT_TRUE(is_refused_here ? arguments.packed.is_y_untouched()
                                  : arguments.packed.is_y_of_a_failed_call(moe_case.backend));

      RankCall correct = pack_rank(problem, misuse.form, counts, communicator->rank());
      call_experts(context, correct);
      const std::vector<BF16> y =
          gather_rows(*communicator, correct.y_rows(), counts, shape.hidden_dim);
      EXPECT_EQ(first_difference(expected, y, shape.hidden_dim), "") << "after the refused call";
    }
  });
}

}  // namespace distmoe::conformance
