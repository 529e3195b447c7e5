// SPDX-License-Identifier: Apache-2.0
#include "kernel_report.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "plan/option_names.hpp"

namespace distmoe::tools {
namespace {

using Json = nlohmann::ordered_json;

Json name_or_null(cuda::Dropped dropped) {
  return dropped == cuda::Dropped::kNot ? Json(nullptr) : Json(cuda::reason_name(dropped));
}

Json heights_json() {
  Json list = Json::array();
  for (const cuda::TileHeight& height : cuda::tile_heights()) {
    list.push_back({{"rows", height.rows},
                    {"shared_bytes", height.shared_bytes},
                    {"registers", height.registers},
                    {"dropped", name_or_null(height.dropped)}});
  }
  return list;
}

Json json_of(const cuda::GroupKind& kind) {
  Json considered = Json::array();
  for (const cuda::TilingCandidate& candidate : cuda::rank_tilings(kind.num_rows)) {
    considered.push_back({{"height", candidate.height},
                          {"pairs", candidate.tiling.num_pairs},
                          {"rows_per_tile", candidate.tiling.rows_per_tile},
                          {"computed_rows", candidate.computed_rows},
                          {"cost", candidate.cost},
                          {"dropped", name_or_null(candidate.dropped)}});
  }
  return {{"rows", kind.num_rows},
          {"count", kind.count},
          {"waits_for_pull", kind.waits_for_pull},
          {"pairs", kind.tiling.num_pairs},
          {"rows_per_tile", kind.tiling.rows_per_tile},
          {"computed_rows", kind.computed_rows},
          {"considered", std::move(considered)}};
}

Json json_of(const cuda::ProductLoad& load) {
  return {{"name", cuda::product_name(load.product)},
          {"m", load.m},
          {"k", load.k},
          {"weight_tiles", load.weight_tiles},
          {"stages", load.stages},
          {"cluster_tiles", load.cluster_tiles},
          {"waves", load.waves},
          {"fill", load.fill},
          {"flops", load.flops},
          {"computed_flops", load.computed_flops},
          {"weight_bytes", load.weight_bytes},
          {"weight_load_bytes", load.weight_load_bytes}};
}

Json json_of(const cuda::NamedLaunch& launch) {
  return {{"kernel", launch.kernel},
          {"blocks", launch.shape.blocks},
          {"threads", launch.shape.threads},
          {"shared_bytes", launch.shape.shared_bytes}};
}

Json json_of(const cuda::FewRowsCandidate& candidate) {
  return {{"w13_rows", candidate.tiles.w13_rows},
          {"w2_rows", candidate.tiles.w2_rows},
          {"cost", candidate.cost}};
}

template <typename Item>
Json list_of(const std::vector<Item>& items) {
  Json list = Json::array();
  for (const Item& item : items) list.push_back(json_of(item));
  return list;
}

Json few_rows_json(const ExplainedCall& call) {
  if (call.not_few != cuda::NotFew::kNo) return nullptr;
  const cuda::FewRowsTiles& tiles = call.few_rows.front().tiles;
  return {{"kernel", cuda::kFewRowsName},
          {"w13_rows", tiles.w13_rows},
          {"w2_rows", tiles.w2_rows},
          {"token_rows", tiles.tokens},
          {"one_token", tiles.is_one_token != 0},
          {"most_rows", call.most_few_rows ? Json(*call.most_few_rows) : Json(nullptr)},
          {"considered", list_of(call.few_rows)}};
}

Json json_of(const ExplainedCall& call, const cuda::ChoiceInputs& inputs) {
  const cuda::BalancedRows& rows = call.rows;
  Json products = Json::array();
  for (const cuda::ProductLoad& load : call.products) {
    const cuda::GroupList& groups = rows.of(load.product);
    Json product = json_of(load);
    product["computed_rows"] = groups.computed_rows;
    product["padding_rows"] = groups.computed_rows - rows.num_rows;
    product["pairs"] = groups.num_pairs;
    product["groups"] = list_of(groups.kinds);
    products.push_back(std::move(product));
  }
  return {
      {"tokens", rows.num_tokens},
      {"rows", rows.num_rows},
      {"pulled_rows", rows.pulled_rows},
      {"rows_per_expert", cuda::rows_per_expert(inputs, rows.num_tokens)},
      {"active_experts", rows.active_experts},
      {"few_rows", few_rows_json(call)},
      {"not_few_rows",
       call.not_few == cuda::NotFew::kNo ? Json(nullptr) : Json(cuda::reason_name(call.not_few))},
      {"starts_w2_early", call.starts_w2_early},
      {"products", std::move(products)},
      {"launches", list_of(call.launches)}};
}

Json choice_json(const cuda::ContextChoice& choice) {
  return {{"kernel", cuda::kGroupedGemmName},
          {"weight_rows_per_tile", cuda::kWeightRows},
          {"token_rows_per_tile", cuda::kMaxTokensPerTile},
          {"cluster_blocks", cuda::kClusterBlocks},
          {"pipeline_stages", cuda::kStages},
          {"shared_bytes", sizeof(cuda::GemmStorage)},
          {"persistent_blocks", choice.persistent_blocks},
          {"clusters", choice.clusters()},
          {"pulling_clusters", choice.pulling_clusters},
          {"publish_blocks", choice.publish_blocks},
          {"rank_sum_blocks", choice.rank_sum_blocks},
          {"arithmetic",
           {{"instruction_k", choice.arithmetic.instruction_k},
            {"stage_k", choice.arithmetic.stage_k},
            {"splits_of_k", choice.arithmetic.splits_of_k}}}};
}

}  // namespace

ExplainedKernels explain_kernels(std::string title, const cuda::ChoiceInputs& inputs,
                                 const std::vector<std::int64_t>& tokens) {
  ExplainedKernels kernels{
      .title = std::move(title), .inputs = inputs, .choice = cuda::choose_kernels(inputs)};
  const std::int64_t max_tokens = *std::ranges::max_element(tokens);
  for (const std::int64_t num_tokens : tokens) {
    ExplainedCall call{.rows = cuda::balanced_rows(inputs, kernels.rank, num_tokens)};
    call.not_few = cuda::why_not_few(inputs, num_tokens);
    if (call.not_few == cuda::NotFew::kNo) {
      call.few_rows = cuda::rank_few_rows_tiles(inputs, kernels.choice, num_tokens);
      if (!cuda::bounds_few_rows(inputs, max_tokens)) {
        call.most_few_rows = cuda::max_few_rows(inputs);
      }
    } else {
      for (const cuda::Product product : {cuda::Product::kW13, cuda::Product::kW2}) {
        call.products.push_back(cuda::product_load(product, inputs, kernels.choice, call.rows));
      }
      call.starts_w2_early = cuda::starts_w2_early(inputs, kernels.choice, num_tokens);
    }
    call.launches =
        cuda::forward_launches(inputs, kernels.choice, kernels.rank, num_tokens, max_tokens);
    kernels.calls.push_back(std::move(call));
  }
  return kernels;
}

std::string json_of(const ExplainedKernels& kernels) {
  const cuda::ChoiceInputs& inputs = kernels.inputs;
  Json calls = Json::array();
  for (const ExplainedCall& call : kernels.calls) calls.push_back(json_of(call, inputs));
  const Json object = {
      {"model", kernels.title.empty() ? Json(nullptr) : Json(kernels.title)},
      {"precision", option_name(inputs.precision)},
      {"kernel_choice", option_name(inputs.kernel_choice)},
      {"combine", option_name(inputs.combine)},
      {"hidden_dim", inputs.hidden_dim},
      {"intermediate_dim", inputs.intermediate_dim},
      {"top_k", inputs.top_k},
      {"num_experts", inputs.num_experts},
      {"ranks", inputs.num_ranks},
      {"ranks_per_device", inputs.ranks_on_device},
      {"sms", inputs.device_sms},
      {"rank", kernels.rank},
      {"local_experts", kernels.calls.front().rows.num_local_experts},
      {"choice", choice_json(kernels.choice)},
      {"tile_heights", heights_json()},
      {"calls", std::move(calls)},
  };
  return object.dump(2) + '\n';
}

}  // namespace distmoe::tools
