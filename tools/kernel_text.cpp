// SPDX-License-Identifier: Apache-2.0
//
// The choice of kernels in words, read top to bottom: what it is for, what a context decides once,
// what each call makes of it.
#include <sstream>

#include "kernel_report.hpp"
#include "number_text.hpp"
#include "plan/byte_text.hpp"
#include "plan/option_names.hpp"

namespace distmoe::tools {
namespace {

constexpr const char* kIndent = "    ";

std::string decimal(double value) { return number_text(value, 1); }

/// "4.2 %": how much more than `whole`.
std::string excess(std::int64_t value, std::int64_t whole) {
  return percent_text(whole == 0 ? 0.0
                                 : static_cast<double>(value - whole) / static_cast<double>(whole));
}

std::string reason_words(cuda::Dropped dropped) {
  switch (dropped) {
    case cuda::Dropped::kNot: return "";
    case cuda::Dropped::kSharedMemory: return "they need more shared memory than a block has";
    case cuda::Dropped::kRegisters: return "their accumulators leave too few registers";
    case cuda::Dropped::kSameTiles: return "a lower height gives the same tiles";
  }
  return "";
}

void write_head(std::ostream& text, const ExplainedKernels& kernels) {
  const cuda::ChoiceInputs& inputs = kernels.inputs;
  if (!kernels.title.empty()) text << kernels.title << "\n";
  text << "kernels of rank " << kernels.rank << " of " << inputs.num_ranks << ", "
       << option_name(inputs.precision) << ", kernel choice " << option_name(inputs.kernel_choice)
       << "\n"
       << kIndent << "D=" << inputs.hidden_dim << " F=" << inputs.intermediate_dim
       << " K=" << inputs.top_k << " E=" << inputs.num_experts << ", "
       << kernels.calls.front().rows.num_local_experts << " experts on this rank\n";
}

/// Runs of heights with one verdict: "8 to 152", "160".
void write_heights(std::ostream& text) {
  const std::vector<cuda::TileHeight> heights = cuda::tile_heights();
  for (std::size_t first = 0; first < heights.size();) {
    std::size_t last = first;
    while (last + 1 < heights.size() && heights[last + 1].dropped == heights[first].dropped) ++last;
    const cuda::Dropped dropped = heights[first].dropped;
    text << kIndent << (dropped == cuda::Dropped::kNot ? "considered: " : "dropped: ")
         << heights[first].rows;
    if (last > first) text << " to " << heights[last].rows;
    text << " token rows a tile";
    if (dropped != cuda::Dropped::kNot) {
      text << ", " << cuda::reason_name(dropped) << ": " << reason_words(dropped);
    }
    text << "\n";
    first = last + 1;
  }
}

void write_choice(std::ostream& text, const ExplainedKernels& kernels) {
  const cuda::ChoiceInputs& inputs = kernels.inputs;
  const cuda::ContextChoice& choice = kernels.choice;
  text << "blocks: " << choice.persistent_blocks << " persistent, one an SM, in "
       << choice.clusters() << " clusters of " << cuda::kClusterBlocks << " ("
       << inputs.ranks_on_device << " rank(s) on a device of " << inputs.device_sms << " SMs)\n"
       << kIndent
       << (choice.pulling_clusters == 0
               ? std::string("no cluster pulls: a single rank has no peers")
               : std::to_string(choice.pulling_clusters) +
                     " clusters pull the peers' rows before they compute")
       << "\n"
       << "products: " << cuda::kGroupedGemmName << ", tiles of " << cuda::kWeightRows
       << " weight rows and up to " << cuda::kMaxTokensPerTile << " token rows, a cluster shares "
       << "its weights; " << cuda::kStages << " stages, " << human_bytes(sizeof(cuda::GemmStorage))
       << " of shared memory\n";
  write_heights(text);
  text << "sums over k: " << choice.arithmetic.instruction_k << " an instruction, "
       << choice.arithmetic.stage_k << " a stage, in " << choice.arithmetic.splits_of_k << " part\n"
       << kIndent
       << "chosen from D, F and precision alone, so that kernel choices tuned and fixed are the "
          "same\n"
       << kIndent << "kernels and give the same bits for every P, number of SMs and tokens\n";
}

void write_group(std::ostream& text, const cuda::GroupKind& kind) {
  text << kIndent << grouped(kind.count) << " group(s) of " << grouped(kind.num_rows) << " rows"
       << (kind.waits_for_pull ? ", pulled ones among them: " : ": ") << kind.tiling.num_pairs
       << " pair(s) of tiles of up to " << kind.tiling.rows_per_tile << " rows, "
       << grouped(kind.computed_rows - kind.num_rows) << " rows of padding\n";
  const std::vector<cuda::TilingCandidate> ranked = cuda::rank_tilings(kind.num_rows);
  if (ranked.size() < 2 || ranked[1].dropped != cuda::Dropped::kNot) return;
  text << kIndent << kIndent << "next: " << ranked[1].tiling.num_pairs << " pairs of up to "
       << ranked[1].tiling.rows_per_tile << " rows, at " << excess(ranked[1].cost, ranked[0].cost)
       << " more\n";
}

void write_product(std::ostream& text, const cuda::ProductLoad& load, std::int32_t clusters) {
  text << kIndent << cuda::product_name(load.product) << " " << load.m << " x " << load.k << ": "
       << grouped(load.cluster_tiles) << " cluster tiles (" << load.weight_tiles
       << " weight tiles of an expert), " << grouped(load.waves) << " wave(s) over " << clusters
       << " clusters, " << percent_text(load.fill) << " full\n"
       << kIndent << kIndent << decimal(static_cast<double>(load.flops) * 1e-9) << " GFLOP, "
       << excess(load.computed_flops, load.flops) << " more with padding; "
       << human_bytes(load.weight_bytes) << " of weights, loaded "
       << decimal(load.weight_bytes == 0 ? 0.0
                                         : static_cast<double>(load.weight_load_bytes) /
                                               static_cast<double>(load.weight_bytes))
       << " times\n";
}

void write_launches(std::ostream& text, const std::vector<cuda::NamedLaunch>& launches) {
  text << kIndent << "launches, blocks x threads:";
  for (const cuda::NamedLaunch& launch : launches) {
    text << (&launch == launches.data() ? " " : ", ") << launch.kernel << " " << launch.shape.blocks
         << "x" << launch.shape.threads;
  }
  text << "\n";
}

std::string reason_words(cuda::NotFew reason) {
  switch (reason) {
    case cuda::NotFew::kNo: return "";
    case cuda::NotFew::kNoTokens: return "there is nothing to compute";
    case cuda::NotFew::kRoutes: return "the call has too many routes";
    case cuda::NotFew::kExperts: return "there are too many experts";
    case cuda::NotFew::kRowsPerExpert: return "the experts have too many rows";
    case cuda::NotFew::kSums: return "combine per_rank keeps results where pulled rows are";
  }
  return "";
}

void write_few_rows(std::ostream& text, const ExplainedCall& call, bool has_peers) {
  if (call.not_few != cuda::NotFew::kNo) {
    text << kIndent << "products not in one launch of " << cuda::kFewRowsName << ", "
         << cuda::reason_name(call.not_few) << ": " << reason_words(call.not_few) << "\n";
    return;
  }
  const cuda::FewRowsCandidate& chosen = call.few_rows.front();
  const cuda::FewRowsTiles& tiles = chosen.tiles;
  text << kIndent << (has_peers ? "both products" : "the whole call") << " in one launch of "
       << cuda::kFewRowsName << ": tiles of " << tiles.w13_rows << " weight rows of w13 and "
       << tiles.w2_rows << " of w2" << (tiles.is_one_token != 0 ? " for each route" : "")
       << ", the cheapest of " << call.few_rows.size() << " pairs, and up to " << tiles.tokens
       << " token rows\n";
  if (!call.most_few_rows) return;
  text << kIndent << "launched beside it: " << cuda::kGroupedGemmName
       << ", which makes the products where peers send more, so that the rank has more than "
       << grouped(*call.most_few_rows) << " rows\n";
}

void write_call(std::ostream& text, const ExplainedKernels& kernels, const ExplainedCall& call) {
  const cuda::BalancedRows& rows = call.rows;
  text << "T=" << rows.num_tokens << ": " << grouped(rows.num_rows) << " rows, "
       << decimal(cuda::rows_per_expert(kernels.inputs, rows.num_tokens)) << " an expert; "
       << rows.active_experts << " experts have rows; " << grouped(rows.pulled_rows)
       << " rows are of peers' tokens\n";
  write_few_rows(text, call, kernels.inputs.num_ranks > 1);
  for (const cuda::ProductLoad& load : call.products) {
    write_product(text, load, kernels.choice.clusters());
    for (const cuda::GroupKind& kind : rows.of(load.product).kinds) write_group(text, kind);
  }
  if (call.starts_w2_early) {
    text << kIndent << "w2_scatter starts on the SMs that w13_swiglu leaves\n";
  }
  write_launches(text, call.launches);
}

}  // namespace

std::string text_of(const ExplainedKernels& kernels) {
  std::ostringstream text;
  write_head(text, kernels);
  write_choice(text, kernels);
  for (const ExplainedCall& call : kernels.calls) write_call(text, kernels, call);
  return text.str();
}

}  // namespace distmoe::tools
