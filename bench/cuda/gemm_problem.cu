// SPDX-License-Identifier: Apache-2.0
#include "gemm_problem.hpp"

#include <algorithm>
#include <numeric>
#include <random>

namespace distmoe::cuda::bench {
namespace {

constexpr int kPeerSlack = 4;  ///< rows of every buffer that nobody may read

__global__ void fill_random(__nv_bfloat16* data, std::size_t size, std::uint32_t seed,
                            float scale) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < size;
       i += step) {
    std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    // The sum of two uniforms: random bits all over the mantissa, and small and large magnitudes.
    const float a = static_cast<float>(z >> 40) * 0x1p-24f;
    const float b = static_cast<float>((z >> 8) & 0xFFFFFF) * 0x1p-24f;
    data[i] = __float2bfloat16((a + b - 1.0f) * scale);
  }
}

void randomize(DeviceArray<__nv_bfloat16>& array, std::size_t size, std::uint32_t seed,
               float scale) {
  array.poison();
  fill_random<<<2048, 256>>>(array.get(), size, seed, scale);
  DISTMOE_BENCH_CUDA(cudaGetLastError());
}

std::vector<float> random_floats(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(size);
  for (float& value : values) value = uniform(random);
  return values;
}

EncodeTiled encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult query{};
  DISTMOE_BENCH_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                      cudaEnableDefault, &query));
  return reinterpret_cast<EncodeTiled>(function);
}

std::vector<TileGroup> make_groups(const ProblemShape& shape) {
  std::vector<TileGroup> groups;
  int row = 0;
  int pair = 0;
  for (int e = 0; e < shape.num_experts(); ++e) {
    const TokenTiling tiling = token_tiling(shape.rows[e]);
    if (shape.rows[e] > 0) {
      groups.push_back({e, row, shape.rows[e], pair, tiling.num_pairs, tiling.rows_per_tile,
                        shape.has_remote_rows ? 1 : 0, 0});
    }
    row += shape.rows[e];
    pair += tiling.num_pairs;
  }
  return groups;
}

}  // namespace

Problem::Problem(const ProblemShape& s)
    : shape(s),
      num_result_rows(s.num_rows() + s.num_rows() / 7 + 1),
      x(static_cast<std::size_t>(s.num_tokens + kPeerSlack) * s.hidden_dim),
      peer_x(s.has_remote_rows ? x.size() : 0),
      gather(s.has_remote_rows ? x.size() : 0),
      w13(static_cast<std::size_t>(s.num_experts()) * 2 * s.intermediate_dim * s.hidden_dim),
      w2(static_cast<std::size_t>(s.num_experts()) * s.intermediate_dim * s.hidden_dim),
      h2(static_cast<std::size_t>(s.num_rows() + kPeerSlack) * s.intermediate_dim),
      result(static_cast<std::size_t>(num_result_rows) * s.hidden_dim),
      bias13(random_floats(static_cast<std::size_t>(s.num_experts()) * 2 * s.intermediate_dim, 5)),
      bias2(random_floats(static_cast<std::size_t>(s.num_experts()) * s.hidden_dim, 6)),
      token_address(s.num_rows()),
      result_address(s.num_rows()),
      source_address(s.num_tokens),
      gather_index(s.num_rows()),
      ready(s.num_tokens / kGatherChunkRows + 1),
      row_expert(s.num_rows()),
      groups(std::max(1, s.num_experts())),
      frame(1) {
  const std::int64_t d = s.hidden_dim;
  const std::int64_t f = s.intermediate_dim;
  const float weight_scale = 4.0f / std::sqrt(static_cast<float>(d));
  randomize(x, static_cast<std::size_t>(s.num_tokens) * d, 1, 1.0f);
  randomize(w13, w13.size(), 2, weight_scale);
  randomize(w2, w2.size(), 3, weight_scale);
  for (int e = 0; e < s.num_experts(); ++e) {
    if (s.rows[e] > 0) continue;
    DISTMOE_BENCH_CUDA(cudaMemset(w13.get() + e * 2 * f * d, 0xFF, 2 * f * d * 2));
    DISTMOE_BENCH_CUDA(cudaMemset(w2.get() + e * f * d, 0xFF, f * d * 2));
  }
  h2.poison();
  result.poison();

  std::mt19937 random(11);
  std::vector<int> slots(num_result_rows);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<std::uint64_t> tokens(s.num_rows()), results(s.num_rows());
  std::vector<std::uint64_t> sources(s.num_tokens);
  std::vector<std::int32_t> gathered(s.num_rows()), experts;
  for (int e = 0; e < s.num_experts(); ++e) experts.insert(experts.end(), s.rows[e], e);
  if (s.has_remote_rows) {
    // Token t of x is only at the peer if t is odd; here its rows are NaN, the gather buffer too.
    randomize(peer_x, static_cast<std::size_t>(s.num_tokens) * d, 4, 1.0f);
    gather.poison();
  }
  for (int t = 0; t < s.num_tokens; ++t) {
    if (!s.has_remote_rows || t % 2 == 0) continue;
    DISTMOE_BENCH_CUDA(cudaMemset(x.get() + t * d, 0xFF, d * 2));
    sources[num_gather_rows++] = peer_x.address() + static_cast<std::uint64_t>(t) * d * 2;
  }
  for (int r = 0; r < s.num_rows(); ++r) {
    const auto token = static_cast<int>(random() % static_cast<unsigned>(s.num_tokens));
    const bool is_remote = s.has_remote_rows && token % 2 == 1;
    gathered[r] = is_remote ? token / 2 : -1;
    tokens[r] = is_remote ? gather.address() + static_cast<std::uint64_t>(token / 2) * d * 2
                          : x.address() + static_cast<std::uint64_t>(token) * d * 2;
    results[r] = result.address() + static_cast<std::uint64_t>(slots[r]) * d * 2;
  }
  result_slot.assign(slots.begin(), slots.begin() + s.num_rows());
  token_address.set(tokens);
  result_address.set(results);
  source_address.set(sources);
  gather_index.set(gathered);
  row_expert.set(experts);
  const std::vector<TileGroup> table = make_groups(s);
  groups.set(table);
  DISTMOE_BENCH_CUDA(cudaMemset(ready.get(), 0, ready.size() * 4));

  initial_frame.num_rows = s.num_rows();
  // Both products take the same groups.
  initial_frame.counts[0] = initial_frame.counts[1] = {
      static_cast<std::int32_t>(table.size()),
      table.empty() ? 0 : table.back().first_pair + table.back().num_pairs};
  initial_frame.num_gather_rows = num_gather_rows;
  initial_frame.scratch.hidden_rows = gather.address();
  initial_frame.gather_epoch = 7;

  int num_sms = 0;
  DISTMOE_BENCH_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  num_blocks = num_sms / 2 * 2;

  w13_args.frame = w2_args.frame = frame.get();
  w13_args.groups = w2_args.groups = groups.get();
  w13_args.tokens.address = token_address.get();
  w13_args.result = w2_args.tokens = {.base = h2.address(), .stride_bytes = f * 2};
  w2_args.result.address = result_address.get();
  w13_args.m = static_cast<int>(2 * f);
  w13_args.k = w2_args.m = static_cast<int>(d);
  w2_args.k = static_cast<int>(f);
  w13_args.timeout_ns = 1'000'000'000;
  w13_args.swiglu.is_clamped = s.is_clamped ? 1 : 0;
  if (s.has_bias) {
    const std::int64_t stride = s.is_interleaved ? 2 : 1;
    w13_args.bias = {bias13.get(), 2 * f, stride, 0};
    w13_args.bias_up = {bias13.get() + (s.is_interleaved ? 1 : f), 2 * f, stride, 0};
    w2_args.bias = {bias2.get(), d, 1, 0};
  }
  if (s.has_remote_rows) {
    w13_args.pull = {
        source_address.get(), gather_index.get(), ready.get(), &frame.get()->scratch.hidden_rows, d * 2, 2, 0};
  }
  const W13Layout layout = s.is_interleaved ? W13Layout{w13.get(), 2 * d, d, 2 * f * d}
                                            : W13Layout{w13.get(), d, f * d, 2 * f * d};
  const EncodeTiled encode = encode_tiled();
  const WeightDims dims = {s.num_experts(), d, f};
  if (!make_w13_map(encode, layout, dims, {}, &w13_map) ||
      !make_w2_map(encode, {w2.get(), f, f * d}, dims, {}, &w2_map)) {
    std::printf("%s: the driver refuses the tensor maps\n", s.name.c_str());
    std::exit(1);
  }
}

void Problem::reset_counters(cudaStream_t stream) {
  DISTMOE_BENCH_CUDA(cudaMemcpyAsync(frame.get(), &initial_frame, sizeof(CallFrame),
                                     cudaMemcpyHostToDevice, stream));
}
void Problem::run_w13(cudaStream_t stream) {
  DISTMOE_BENCH_CUDA(launch_w13_swiglu(w13_args, w13_map, num_blocks, stream));
}
void Problem::run_w2(cudaStream_t stream) {
  DISTMOE_BENCH_CUDA(launch_w2_scatter(w2_args, w2_map, num_blocks, stream));
}

}  // namespace distmoe::cuda::bench
