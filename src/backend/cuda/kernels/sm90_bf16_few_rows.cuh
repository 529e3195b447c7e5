// SPDX-License-Identifier: Apache-2.0
//
// Both products of a forward call of few rows in one launch; on a rank without peers the whole
// call, its routing and combine too. Weights decide how long it takes, so that they flow from the
// first tile of W13 to the last of W2 without a pause.
//
//   route     every block: ids and scores -> tables in shared memory      tile/few_rows_routing.cuh
//   W13       h2[r, f] = bf16(swiglu(bf16(gate + bias), bf16(up + bias)))
//   W2        h3[r, d] = bf16(acc + bias2)
//   combine   y[t, d]  = bf16(sum_k fp32(h3) * score), k in order         tile/few_rows_combine.cuh
//
// With peers the routing kernels have run: blocks read the rows of each expert, pull what peers
// have of them and store h3 where its owner reads it. How many rows peers send is known on the
// device alone: of more than args.most_rows the kernel does nothing, and the grouped GEMM, launched
// behind it, computes what it left.
//
// m, n, k: m = rows of a weight matrix (2F or D), n = rows of an expert, k = D or F. The sums over
// k are those of the grouped GEMM, bit by bit: stages of 64, instructions of 16, never split.
//
// A tile is 64 to 128 weight rows x 8 to 64 rows of one expert, as the host chose. Blocks draw
// tiles in order, those of W13 first. A tile of W2 waits until all tiles of W13 of its expert are
// stored; its weights do not. One token of few routes has them all in one tile of W2, which adds
// them up. Roles of a block of 384 threads:
//   warp 0        draws tiles, loads weights by TMA
//   warps 1-3     token rows by cp.async
//   warps 4-11    two consumer warpgroups that take tiles in turn: wgmma, epilogue, stores, combine
// Barriers: full[stage]  97 arrivals (96 gathering threads, 1 for the bytes of the weights)
//           empty[stage] 4 arrivals (the warps of the warpgroup whose tile it was)
//           work_full 1, work_empty 11 arrivals: the tiles that the roles walk
//           computed[warpgroup] 4 arrivals: its products are done, it is the other's turn
//           named barriers 1, 2: one per consumer warpgroup; 4: the gathering warps
// Waits for other blocks are for those that run already (tile/few_rows_schedule.cuh).
//
// Limits: E <= kFewExperts of this rank, T * K <= kFewRoutes without peers, with peers most_rows <=
// kFewRowsPerExpert * E, so that tiles count in 22 bits; k % 8 == 0, output
// width % 8 == 0, rows and weights at multiples of 16 bytes.
#pragma once

#include <cuda.h>

#include <cuda/ptx>

#include <cstdint>

#include "backend/cuda/kernels/first_fault.cuh"
#include "backend/cuda/kernels/sm90_bf16_few_rows.hpp"
#include "backend/cuda/ptx/grid_dependency.cuh"
#include "backend/cuda/ptx/tensor_map.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/tile/few_rows_combine.cuh"
#include "backend/cuda/tile/few_rows_operands.cuh"
#include "backend/cuda/tile/few_rows_routing.cuh"
#include "backend/cuda/tile/few_rows_schedule.cuh"
#include "backend/cuda/tile/operand_load.cuh"
#include "backend/cuda/tile/row_pull.cuh"
#include "backend/cuda/tile/tile_epilogue.cuh"

namespace distmoe::cuda {

/// The count of a group's stored tiles of W13, or of all groups' where they have one token.
__device__ __forceinline__ std::uint32_t* stored_tiles(const FewRowsArgs& args,
                                                       const FewRowsTables& tables, int group) {
  return &args.counters->stored_tiles[tables.turn][args.tiles.is_one_token != 0 ? 0 : group];
}

/// Ends the call for those that come after it. By one thread, when all blocks have drawn their last
/// number.
__device__ inline void end_few_rows_call(const FewRowsArgs& args, const FewRowsTables& tables) {
  CallState& state = *args.state;
  CallFrame frame{};
  frame.call = args.call;
  frame.num_rows = tables.num_rows;
  if (has_failed(args, tables)) {
    frame.failed = 1;
    frame.fault = few_rows_fault(args, tables);
    keep_first_fault(state, frame);
  } else {
    // The host placed scratch for every route, see CudaBackend::add_whole_call().
    const std::int64_t routes = std::int64_t{args.num_tokens} * args.top_k;
    state.peak_rows = max(state.peak_rows, min(routes, args.capacity_rows));
  }
  *args.frame = frame;
}

__device__ __forceinline__ int num_few_stages(const FewRowsArgs& args, const FewRowsTile& work) {
  const bool is_w2 = work.product == static_cast<std::int32_t>(Product::kW2);
  return ((is_w2 ? args.w2.k : args.w13.k) + kStageK - 1) / kStageK;
}

/// Role of the warp that loads weights: of its first thread or, for one token, of all. `draw` is
/// the block's first, in the first thread; token_tiles is 0 where the call computes nothing.
template <bool kHasPeers, bool kIsOneToken>
__device__ __forceinline__ void run_few_weight_load(const FewRowsArgs& args,
                                                    const FewRowsWeights& weights,
                                                    FewRowsStorage& shared, FewRowsDraw draw,
                                                    int token_tiles) {
  const bool is_first = !kIsOneToken || threadIdx.x == 0;
  const auto drawn_number = [&] {
    return kIsOneToken ? __shfl_sync(kAllLanes, draw.number(), 0) : draw.number();
  };
  const FewRowsSchedule schedule(args, shared.tables, token_tiles);
  FewRowsWorkWriter writer;
  FewRowsStage stage(args.ring);
  FewRowsTile work = schedule.tile(drawn_number());
  while (work.expert >= 0) {
    if (is_first) writer.write(shared, work);
    const bool is_of_routes =
        kIsOneToken && work.product == static_cast<std::int32_t>(Product::kW2);
    const int num_stages = num_few_stages(args, work);
    for (int i = 0; i < num_stages; ++i, stage.advance()) {
      ptx::wait(&shared.empty[stage.slot], stage.parity ^ 1);
      // NOTE: not before the last stage has room: a block whose tile waits must not take another
      // one from those that don't. The stages in the ring last longer than the answer takes.
      if (i == num_stages - 1 && is_first) draw = FewRowsDraw::next(args);
      if (is_of_routes) {
        weights.load_of_routes(shared, stage.slot, work, i * kStageK);
      } else if (is_first) {
        weights.load(shared, stage.slot, work, i * kStageK);
      }
      if constexpr (kIsOneToken) __syncwarp();
    }
    work = schedule.tile(drawn_number());
  }
  if (!is_first) return;
  writer.write(shared, work);
  if (!schedule.is_last(draw.number())) return;
  draw.begin_next_turn(args);
  if constexpr (!kHasPeers) end_few_rows_call(args, shared.tables);
}

/// Waits until h2 of a group, or of all of one token, is stored. Blocks that run already store it.
/// NOTE: one thread of a block asks: at one token all blocks ask for the same count, and those who
/// ask hold up those who count.
__device__ __forceinline__ void wait_for_h2(const FewRowsArgs& args, const FewRowsTables& tables,
                                            int group) {
  if (threadIdx.x == 32) {
    const FewRowsGroup* groups = &tables.groups[group];
    const int token_tiles = args.tiles.is_one_token != 0
                                ? tables.num_tiles
                                : static_cast<int>(groups[1].first_tile - groups[0].first_tile);
    const auto tiles = static_cast<std::uint32_t>(FewRowsWeightTiles(args).w13 * token_tiles);
    while (ptx::load_acquire_gpu(stored_tiles(args, tables, group)) < tiles) {
    }
  }
  ptx::named_barrier_sync<kGatherThreads>(static_cast<int>(FewRowsBarrier::kGather));
}

/// Pulls peers' rows into the gather buffer, row by row as they are drawn; by whole warps.
__device__ inline void pull_few_rows(const FewRowsArgs& args, const FewRowsTables& tables) {
  const GatherPull& pull = args.w13.pull;
  const int num_rows = args.frame->num_gather_rows;
  const std::uint64_t buffer = *pull.buffer;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  while (true) {
    const int drawn = is_first_lane ? atomicAdd(&args.frame->next_gather_chunk, 1) : 0;
    const int row = __shfl_sync(kAllLanes, drawn, 0);
    if (row >= num_rows) return;
    copy_row(pull.source_address[row], buffer + row * pull.buffer_stride_bytes,
             args.w13.k * 2);
    __syncwarp();
    if (is_first_lane) ptx::add_release_gpu(&args.counters->pulled_rows[tables.turn], 1);
  }
}

/// Waits until all pulled rows are there. Warps that run already pull them.
__device__ __forceinline__ void wait_for_pulled_rows(const FewRowsArgs& args,
                                                     const FewRowsTables& tables) {
  if (threadIdx.x == 32) {
    const auto rows = static_cast<std::uint32_t>(args.frame->num_gather_rows);
    while (ptx::load_acquire_gpu(&args.counters->pulled_rows[tables.turn]) < rows) {
    }
  }
  ptx::named_barrier_sync<kGatherThreads>(static_cast<int>(FewRowsBarrier::kGather));
}

/// Role of the gathering warps.
template <bool kHasPeers>
__device__ __forceinline__ void run_few_token_gather(const FewRowsArgs& args,
                                                     FewRowsStorage& shared) {
  if constexpr (kHasPeers) wait_for_pulled_rows(args, shared.tables);
  FewRowsGather gather(static_cast<int>(threadIdx.x) - 32);
  FewRowsWorkReader reader;
  FewRowsStage stage(args.ring);
  for (FewRowsTile work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    if (work.product == static_cast<std::int32_t>(Product::kW2)) {
      wait_for_h2(args, shared.tables, work.group);
      const int num_rows = args.tiles.is_one_token != 0 ? shared.tables.num_rows : work.num_rows;
      gather.start_tile(work.row_begin, num_rows, args.w2.k);
      gather.locate_rows([&](int row) { return row_address(args.w2.tokens, row); });
    } else {
      gather.start_tile(work.row_begin, work.num_rows, args.w13.k);
      gather.locate_rows([&](int row) -> std::uint64_t {
        if constexpr (kHasPeers) return row_address(args.w13.tokens, row);
        const int token = shared.tables.route_of_row[row] / args.top_k;
        return args.x + token * args.x_stride_bytes;
      });
    }
    const int num_stages = num_few_stages(args, work);
    for (int i = 0; i < num_stages; ++i, stage.advance()) {
      ptx::wait(&shared.empty[stage.slot], stage.parity ^ 1);
      gather.copy_stage(stage_address(args, shared, stage.slot) + args.ring.token_offset);
      ptx::cp_async_arrive(ptx::shared_address(&shared.full[stage.slot]));
    }
  }
}

/// acc += weights x tokens^T over all of k. Stages are released one late, when their products are
/// done.
template <int kN>
__device__ __forceinline__ void accumulate_few(const FewRowsArgs& args, FewRowsStorage& shared,
                                               FewRowsStage& stage, int num_stages, int lane,
                                               Accumulators<kN>& acc) {
  constexpr std::uint64_t kStepK = kInstructionK * 2 >> 4;
  constexpr std::uint64_t kStepM = 64 * kRowBytes >> 4;
  const std::uint64_t weights = ptx::swizzled_descriptor(ptx::shared_address(shared.ring));
  const std::uint32_t to_next = args.ring.stage_bytes >> 4;
  const std::uint32_t to_tokens = args.ring.token_offset >> 4;
  int previous = -1;
  for (int i = 0; i < num_stages; ++i, stage.advance()) {
    ptx::wait(&shared.full[stage.slot], stage.parity);
    // cp.async wrote the tokens as ordinary memory accesses; wgmma reads through the async proxy.
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    const std::uint64_t a = weights + stage.slot * to_next;
    const std::uint64_t b = a + to_tokens;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStageK / kInstructionK; ++k) {
      ptx::Wgmma<kN>::run(acc[0], a + k * kStepK, b + k * kStepK);
      ptx::Wgmma<kN>::run(acc[1], a + k * kStepK + kStepM, b + k * kStepK);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous >= 0 && lane == 0) ptx::arrive_after_reads(&shared.empty[previous]);
    previous = stage.slot;
  }
  ptx::wgmma_wait<0>();
  if (lane == 0) ptx::arrive_after_reads(&shared.empty[previous]);
}

/// Warpgroups take tiles in turn. One waits for the other's products, not for its epilogue, before
/// it looks at the stages of its own tile: a wait tells a stage's use from the next one alone.
class FewRowsTurns {
 public:
  __device__ __forceinline__ void take(FewRowsStorage& shared, int warpgroup) {
    // The first warpgroup begins, and is one tile ahead from then on.
    if (warpgroup != 0 || tiles_ > 0) {
      const int others = tiles_ - (warpgroup == 0 ? 1 : 0);
      ptx::wait(&shared.computed[1 - warpgroup], static_cast<std::uint32_t>(others) & 1);
    }
    ++tiles_;
  }
  __device__ __forceinline__ void pass(FewRowsStorage& shared, const ConsumerThread& self) const {
    if (self.lane == 0) ptx::arrive(&shared.computed[self.warpgroup]);
  }

 private:
  int tiles_ = 0;
};
static_assert(kConsumerWarpgroups == 2);

/// A consumer thread's way through the tiles and their stages.
struct FewRowsConsumer {
  FewRowsStage& stage;
  const FewRowsTurns& turns;
  const ConsumerThread& self;
};

/// One product of a tile and the store of its result.
template <typename Epilogue, int kN>
__device__ __forceinline__ void compute_few(const FewRowsArgs& args, FewRowsStorage& shared,
                                            const FewRowsPart& part, const FewRowsTile& work,
                                            const FewRowsConsumer& consumer) {
  const auto& [product, column, end_column] = part;
  const auto& [stage, turns, self] = consumer;
  const TileBias bias = Epilogue::load_bias(product, work.expert, column, self);
  // Looked up before the product, so that the answer is there after it.
  const std::uint64_t result_row =
      self.thread < work.num_rows ? row_address(product.result, work.row_begin + self.thread) : 0;
  // NOTE: cleared for the reason that compute_tile() of the grouped GEMM gives.
  Accumulators<kN> acc;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  accumulate_few<kN>(args, shared, stage, (product.k + kStageK - 1) / kStageK, self.lane, acc);
  turns.pass(shared, self);
  if (self.thread < kFewTileTokens) shared.result_row[self.warpgroup][self.thread] = result_row;
  store_few<Epilogue, kN>(part, shared, acc, bias, self);
}

/// Calls compute_few for the instruction width of the tile.
template <typename Epilogue, int kN = kFewTileTokens>
__device__ __forceinline__ void dispatch_few(const FewRowsArgs& args, FewRowsStorage& shared,
                                             const FewRowsPart& part, const FewRowsTile& work,
                                             const FewRowsConsumer& consumer) {
  if (instruction_rows(work.num_rows) == kN) {
    compute_few<Epilogue, kN>(args, shared, part, work, consumer);
  } else if constexpr (kN > 8) {
    dispatch_few<Epilogue, kN == 16 ? 8 : kN - 16>(args, shared, part, work, consumer);
  }
}

template <bool kIsClamped>
__device__ __forceinline__ void consume_w13(const FewRowsArgs& args, FewRowsStorage& shared,
                                            const FewRowsTile& work,
                                            const FewRowsConsumer& consumer) {
  const int columns = args.tiles.w13_rows / 2;
  const int column = work.weight_tile * columns;
  const FewRowsPart part = {args.w13, column, min(column + columns, args.w13.m / 2)};
  dispatch_few<SwigluEpilogue<kIsClamped>>(args, shared, part, work, consumer);
  sync_warpgroup(consumer.self.warpgroup);  // the tile's rows are stored
  if (consumer.self.thread == 0) ptx::add_release_gpu(stored_tiles(args, shared.tables, work.group), 1);
}

template <bool kHasPeers>
__device__ __forceinline__ void consume_w2(const FewRowsArgs& args, FewRowsStorage& shared,
                                           const FewRowsTile& work,
                                           const FewRowsConsumer& consumer) {
  const int column = work.weight_tile * args.tiles.w2_rows;
  const int end_column = min(column + args.tiles.w2_rows, args.w2.m);
  const FewRowsPart part = {args.w2, column, end_column};
  dispatch_few<RowEpilogue>(args, shared, part, work, consumer);
  if constexpr (kHasPeers) {
    sync_warpgroup(consumer.self.warpgroup);  // all have read the table of result rows
  } else {
    combine_complete(args, shared, work, column, end_column, consumer.self);
  }
}

__device__ __forceinline__ void consume_one_token(const FewRowsArgs& args, FewRowsStorage& shared,
                                                  const FewRowsTile& work,
                                                  const FewRowsConsumer& consumer) {
  const auto& [stage, turns, self] = consumer;
  const OneTokenTile tile(args, shared.tables, work, self);
  Accumulators<kOneTokenRoutes> acc;
#pragma unroll
  for (int i = 0; i < kOneTokenRoutes / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
  accumulate_few<kOneTokenRoutes>(args, shared, stage, num_few_stages(args, work), self.lane, acc);
  turns.pass(shared, self);
  tile.combine(args, reinterpret_cast<float*>(shared.staging[self.warpgroup]), acc, self);
}

/// Role of the consumer warpgroups.
template <bool kIsClamped, bool kHasPeers>
__device__ __forceinline__ void run_few_consumer(const FewRowsArgs& args, FewRowsStorage& shared) {
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  const ConsumerThread self = {__shfl_sync(kAllLanes, thread / kWarpgroupThreads, 0),
                               thread % kWarpgroupThreads, thread % kWarpgroupThreads / 32,
                               thread % 32};
  FewRowsWorkReader reader;
  FewRowsStage stage(args.ring);
  FewRowsTurns turns;
  const FewRowsConsumer consumer = {stage, turns, self};
  int turn = 0;
  for (FewRowsTile work = reader.next(shared); work.expert >= 0; work = reader.next(shared)) {
    const bool is_mine = turn == self.warpgroup;
    turn = (turn + 1) % kConsumerWarpgroups;
    if (!is_mine) {
      stage.advance_by(num_few_stages(args, work));
      continue;
    }
    turns.take(shared, self.warpgroup);
    if (work.product == static_cast<std::int32_t>(Product::kW13)) {
      consume_w13<kIsClamped>(args, shared, work, consumer);
    } else if (!kHasPeers && args.tiles.is_one_token != 0) {
      consume_one_token(args, shared, work, consumer);
    } else {
      consume_w2<kHasPeers>(args, shared, work, consumer);
    }
  }
}

__device__ inline void init_few_barriers(FewRowsStorage& shared) {
  for (int i = 0; i < kFewStagesMax; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.full[i], kFullArrivals);
    ::cuda::ptx::mbarrier_init(&shared.empty[i], kWarpgroupThreads / 32);
  }
  for (int i = 0; i < kWorkSlots; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.work_full[i], 1);
    ::cuda::ptx::mbarrier_init(&shared.work_empty[i], kFewWorkReaders);
  }
  for (int i = 0; i < kConsumerWarpgroups; ++i) {
    ::cuda::ptx::mbarrier_init(&shared.computed[i], kWarpgroupThreads / 32);
  }
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

/// Clears the counts of the next launch; by the consumers of one block.
__device__ __forceinline__ void clear_next_counts(const FewRowsArgs& args,
                                                  const FewRowsTables& tables, int thread) {
  if (blockIdx.x != gridDim.x - 1) return;
  FewRowsCounters& counters = *args.counters;
  const int next = 1 - tables.turn;
  for (int i = thread; i < kFewExperts; i += kConsumerThreads) counters.stored_tiles[next][i] = 0;
  if (thread == 0) counters.pulled_rows[next] = 0;
}

template <bool kIsClamped, bool kHasPeers>
__global__ void __launch_bounds__(kGemmThreads, 1)
    few_rows_kernel(const __grid_constant__ FewRowsArgs args,
                    const __grid_constant__ CUtensorMap w13_map,
                    const __grid_constant__ CUtensorMap w2_map) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  FewRowsStorage& shared = *reinterpret_cast<FewRowsStorage*>(shared_bytes);
  FewRowsTables& tables = shared.tables;
  // By warps that have nothing to do with the routes of one token.
  if (threadIdx.x == 32) init_few_barriers(shared);
  if (threadIdx.x == 64) ptx::prefetch_tensor_map(w13_map);
  if (threadIdx.x == 96) ptx::prefetch_tensor_map(w2_map);
  ptx::wait_for_earlier_kernels();
  if constexpr (kHasPeers) {
    // The grouped GEMM's call. Nothing is drawn, so that the next launch finds the counts as they
    // are.
    if (args.frame->num_rows > args.most_rows) return;
  }
  // Its answer comes while the block routes.
  FewRowsDraw draw;
  if (threadIdx.x == 0) draw = FewRowsDraw::next(args);
  if constexpr (kHasPeers) {
    read_few_groups(args, tables);
  } else {
    route_few_rows(args, tables, shared.routing);
  }
  if (threadIdx.x == 0) tables.turn = draw.turn();
  __syncthreads();
  const bool failed = !kHasPeers && has_failed(args, tables);
  if (threadIdx.x < 32) {
    const FewRowsWeights weights(args, w13_map, w2_map);
    const int token_tiles = failed ? 0 : tables.num_tiles;
    if (!kHasPeers && args.tiles.is_one_token != 0) {
      run_few_weight_load<kHasPeers, true>(args, weights, shared, draw, token_tiles);
    } else if (threadIdx.x == 0) {
      run_few_weight_load<kHasPeers, false>(args, weights, shared, draw, token_tiles);
    }
  } else if (threadIdx.x < kWarpgroupThreads) {
    run_few_token_gather<kHasPeers>(args, shared);
  } else {
    // What is to be done once in a call is done while the first weights are on their way.
    const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
    clear_next_counts(args, tables, thread);
    if constexpr (kHasPeers) {
      pull_few_rows(args, tables);
    } else {
      fill_incomplete(args, tables, failed, thread);
      if (blockIdx.x == gridDim.x - 1) record_routing(args, tables, thread, kConsumerThreads);
    }
    run_few_consumer<kIsClamped, kHasPeers>(args, shared);
  }
}

}  // namespace distmoe::cuda
