// SPDX-License-Identifier: Apache-2.0
//
// Invariant: addresses of rows are formed in 64 bits: one row beyond 2^31 or 2^32 elements lies
// where the product says. Nothing of that size is allocated or touched: offsets are compared, from
// a null base as integers.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "backend/cpu/cpu_backend.hpp"
#include "distmoe/error.hpp"
#include "distmoe/memory_plan.hpp"
#include "plan/layer_bytes.hpp"

namespace distmoe::cpu {
namespace {

/// Bytes from the base of dense rows to row `index`.
std::int64_t offset_of_row(std::int64_t width, std::int64_t index) {
  constexpr std::uintptr_t kBase = 4096;
  const DenseRows rows{std::bit_cast<BF16*>(kBase), width};
  return static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(rows.row(index)) - kBase);
}

struct RowCase {
  std::int64_t width, row;
};

// reports: A77, A78, A79: row numbers of the reports and one row over; every stage that walks rows
// (gather, SwiGLU, combine) does it through DenseRows or through the same 64-bit product.
TEST(Addresses, RowsBeyond31BitsOfElementsLieWhereTheProductSays) {
  const RowCase cases[] = {{1536, 1398102}, {7168, 299594},    {4096, 524288},  {2048, 1048576},
                           {4096, 600000},  {7168, 56000 * 8}, {4096, 655350},  {34816, 61682},
                           {2816, 1525201}, {5632, 1525201},   {17408, 246724}, {4096, 524289}};
  for (const RowCase& c : cases) {
    ASSERT_GE(c.width * c.row, std::int64_t{1} << 31) << c.width << " x " << c.row;
    EXPECT_EQ(offset_of_row(c.width, c.row), 2 * c.width * c.row);
  }
  EXPECT_EQ(offset_of_row(2816, 1525201) + 2 * 2815, 2 * std::int64_t{4294968831});
}

// reports: A80: a communication buffer beyond 4 GiB, and scratch regions beyond it, at 64 ranks.
TEST(Addresses, PlansBeyond4GiBKeepTheirBytes) {
  Config config;
  config.max_tokens = 65536;
  config.hidden_dim = 7168;
  config.intermediate_dim = 2048;
  config.top_k = 8;
  config.num_experts = 256;
  config.max_moe_layers_per_activation_slot = 1;
  config.device_scratch_capacity_factor = 64;
  config.inference = true;
  const MemoryPlan plan = plan_memory(config, 64);
  const std::int64_t rows = std::int64_t{65536} * 8 * 32;  // T * P * min(K, L), L = 4
  ASSERT_EQ(plan.device_scratch_rows, rows);
  EXPECT_EQ(plan.device_scratch_bytes, 2 * rows * (7168 + 3 * 2048));
  std::int64_t receive = 0;
  for (const PlanBuffer& buffer : plan.communication_buffers) {
    if (buffer.name == "receive staging") receive = buffer.bytes;
  }
  EXPECT_EQ(receive, std::int64_t{65536} * 63 * 7168 * 2);
  EXPECT_GT(receive, std::int64_t{1} << 32);
  const LayerBytes<> bytes{layer_dims(config)};
  const LayerRegions regions = bytes.scratch_regions(rows);
  EXPECT_EQ(regions.x, 2 * rows * 7168);
  EXPECT_EQ(offset_of_row(4096, rows - 1), 2 * 4096 * (rows - 1));
}

/// Whether a backend of such a plan is refused before it allocates anything, with the numbers.
void expect_refused(std::int64_t max_tokens, int size, std::int64_t rows) {
  Config config;
  config.max_tokens = max_tokens;
  config.hidden_dim = config.intermediate_dim = config.top_k = 1;
  config.num_experts = size;
  config.max_moe_layers_per_activation_slot = 1;
  config.device_scratch_capacity_factor = size;
  config.inference = true;
  BackendSetup setup;
  setup.config = config;
  setup.plan = plan_memory(config, size);
  setup.size = size;
  try {
    make_backend(std::move(setup));
    ADD_FAILURE() << max_tokens << " tokens of " << size << " ranks were accepted";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << text;
    for (const std::int64_t value : {max_tokens, max_tokens * (size - 1), rows}) {
      EXPECT_NE(text.find(std::to_string(value)), std::string::npos) << value << ": " << text;
    }
  }
}

TEST(Addresses, MoreReceivedTokensThan31BitsCountAreRefused) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  expect_refused(kMost, 3, 3 * kMost);
  expect_refused(std::int64_t{1} << 30, 3, 3 * (std::int64_t{1} << 30));
  EXPECT_NO_THROW(check_received_rows(kMost, 1, 8 * kMost));
  EXPECT_NO_THROW(check_received_rows(kMost, 2, 8 * kMost));
  // Fewer rows than tokens: no more can arrive.
  EXPECT_NO_THROW(check_received_rows(kMost, 64, kMost));
  EXPECT_THROW(check_received_rows(kMost, 64, kMost + 1), Error);
}

}  // namespace
}  // namespace distmoe::cpu
