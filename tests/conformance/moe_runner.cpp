// SPDX-License-Identifier: Apache-2.0
#include "conformance/moe_runner.hpp"

#include <algorithm>
#include <mutex>
#include <numeric>

namespace distmoe::conformance {

MoeShape fit(MoeShape shape, const MoeCase& moe_case) {
  const std::int64_t step = contract_of(moe_case).row_step;
  for (std::int64_t* width : {&shape.hidden_dim, &shape.intermediate_dim}) {
    *width = (*width + step - 1) / step * step;
  }
  return shape;
}

TokenCounts even_split(std::int64_t num_tokens, int ranks) {
  TokenCounts counts;
  for (int rank = 0; rank < ranks; ++rank) {
    counts.push_back(num_tokens * (rank + 1) / ranks - num_tokens * rank / ranks);
  }
  return counts;
}

TokenCounts ragged_split(std::int64_t num_tokens, int ranks, std::uint64_t seed) {
  TokenCounts counts(static_cast<std::size_t>(ranks));
  std::int64_t left = num_tokens;
  for (std::size_t rank = 0; rank + 1 < counts.size(); ++rank) {
    const std::uint64_t bits = mix(seed, 77, rank);
    const bool is_idle = bits % 3 == 0;
    counts[rank] =
        is_idle ? 0 : static_cast<std::int64_t>((bits >> 8) % static_cast<std::uint64_t>(left + 1));
    left -= counts[rank];
  }
  counts.back() = left;
  return counts;
}

Config config_of(const MoeProblem& problem, const MoeCase& moe_case, const CallForm& form,
                 std::int64_t max_tokens) {
  Config config;
  config.max_tokens = std::max<std::int64_t>(max_tokens, 1);
  config.hidden_dim = problem.shape.hidden_dim;
  config.intermediate_dim = problem.shape.intermediate_dim;
  config.top_k = problem.shape.top_k;
  config.num_experts = problem.shape.num_experts;
  config.max_moe_layers_per_activation_slot = 1;
  config.device_scratch_capacity_factor = moe_case.ranks;
  config.distinct_experts = false;
  config.inference = true;
  config.combine = moe_case.combine;
  config.precision = moe_case.precision;
  config.pipeline = moe_case.pipeline;
  config.activation = problem.activation;
  config.swiglu_alpha = problem.alpha;
  config.swiglu_limit = problem.limit;
  config.gate_up_layout =
      form.w13 == W13Form::kInterleaved ? GateUpLayout::kInterleaved : GateUpLayout::kConcatenated;
  config.timeout = std::chrono::seconds(60);
  return config;
}

CallForm form_of(const MoeCase& moe_case, CallForm form, bool inference) {
  if (moe_case.is_prepared) {
    form.prepared = BlockScaledConfig{.format = moe_case.precision, .inference = inference};
  }
  return form;
}

RankCall pack_rank(const MoeProblem& problem, const CallForm& form, const TokenCounts& counts,
                   int rank) {
  const auto first = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  // Contiguous blocks; the first E mod P ranks own one more.
  const auto ranks = static_cast<std::int64_t>(counts.size());
  const std::int64_t each = problem.shape.num_experts / ranks;
  const std::int64_t more = problem.shape.num_experts % ranks;
  const std::int64_t begin = rank * each + std::min<std::int64_t>(rank, more);
  return {problem, form, Range{first, first + counts[static_cast<std::size_t>(rank)]},
          Range{begin, begin + each + (rank < more ? 1 : 0)}};
}

Context make_context(const Config& config, const MoeCase& moe_case,
                     std::shared_ptr<Communicator> communicator) {
  const int rank = communicator == nullptr ? 0 : communicator->rank();
  return Context::create(config, std::move(communicator),
                         {.backend = moe_case.backend,
                          .num_threads = moe_case.num_threads,
                          .device = device_of(moe_case, rank).index});
}

std::vector<BF16> gather_rows(Communicator& communicator, const std::vector<BF16>& mine,
                              const TokenCounts& counts, std::int64_t width) {
  const auto total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  std::vector<BF16> all(static_cast<std::size_t>(total * width));
  const std::vector<std::span<const std::byte>> send(counts.size(), std::as_bytes(std::span(mine)));
  std::vector<std::span<std::byte>> receive;
  std::span<BF16> rest(all);
  for (const std::int64_t tokens : counts) {
    const auto size = static_cast<std::size_t>(tokens * width);
    receive.push_back(std::as_writable_bytes(rest.first(size)));
    rest = rest.subspan(size);
  }
  communicator.alltoallv(send, receive, std::chrono::seconds(60));
  return all;
}

std::vector<BF16> run(const MoeProblem& problem, const MoeCase& moe_case, const TokenCounts& counts,
                      const CallForm& form, const CallOptions& options) {
  const Config config =
      config_of(problem, moe_case, form, *std::max_element(counts.begin(), counts.end()));
  std::vector<BF16> result;
  std::mutex mutex;
  run_group(moe_case, [&](const std::shared_ptr<Communicator>& communicator) {
    const int rank = communicator->rank();
    const RankCall call = pack_rank(problem, form_of(moe_case, form), counts, rank);
    Context context = make_context(config, moe_case, communicator);
    call_experts(context, call, options);
    std::vector<BF16> all =
        gather_rows(*communicator, call.y_rows(), counts, problem.shape.hidden_dim);
    const std::scoped_lock lock(mutex);
    result = std::move(all);
  });
  return result;
}

std::vector<BF16> run(const MoeProblem& problem, const MoeCase& moe_case, const CallForm& form,
                      const CallOptions& options) {
  const TokenCounts counts = even_split(problem.shape.num_tokens, moe_case.ranks);
  return run(problem, moe_case, counts, form, options);
}

}  // namespace distmoe::conformance
