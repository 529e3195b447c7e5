// SPDX-License-Identifier: Apache-2.0
#include "gemm_check.hpp"

#include <algorithm>
#include <cmath>

namespace distmoe::cuda::bench {
namespace {

struct Reference {
  const std::uint64_t* token_address;
  const __nv_bfloat16* w13;
  const __nv_bfloat16* w2;
  const float* bias13;
  const float* bias2;
  const std::int32_t* row_expert;
  const __nv_bfloat16* h2;
  int d, f;
  bool interleaved, clamped, bias;
};

__device__ float warp_dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int k) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < k; i += 32)
    sum += __bfloat162float(a[i]) * __bfloat162float(b[i]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  return sum;
}

__device__ float round_bf16(float v) { return __bfloat162float(__float2bfloat16(v)); }

/// One warp an output: rows[i] of h2, column blockIdx.x * 8 + warp.
__global__ void reference_w13(Reference ref, const int* rows, float* out) {
  const int f = blockIdx.x * 8 + threadIdx.x / 32;
  const int row = rows[blockIdx.y];
  if (f >= ref.f) return;
  const std::int64_t e = ref.row_expert[row];
  const std::int64_t gate_row = ref.interleaved ? 2 * f : f;
  const std::int64_t up_row = ref.interleaved ? 2 * f + 1 : ref.f + f;
  const auto* x = reinterpret_cast<const __nv_bfloat16*>(ref.token_address[row]);
  const __nv_bfloat16* w = ref.w13 + e * 2 * ref.f * ref.d;
  float g = warp_dot(x, w + gate_row * ref.d, ref.d);
  float u = warp_dot(x, w + up_row * ref.d, ref.d);
  if (ref.bias) g += ref.bias13[e * 2 * ref.f + gate_row], u += ref.bias13[e * 2 * ref.f + up_row];
  g = round_bf16(g);
  u = round_bf16(u);
  float h;
  if (ref.clamped) {
    g = fminf(g, 7.0f);
    u = fmaxf(fminf(u, 7.0f), -7.0f);
    h = g / (1.0f + expf(-1.702f * g)) * (u + 1.0f);
  } else {
    h = g / (1.0f + expf(-g)) * u;
  }
  if (threadIdx.x % 32 == 0) out[static_cast<std::int64_t>(blockIdx.y) * ref.f + f] = round_bf16(h);
}

__global__ void reference_w2(Reference ref, const int* rows, float* out) {
  const int d = blockIdx.x * 8 + threadIdx.x / 32;
  const int row = rows[blockIdx.y];
  if (d >= ref.d) return;
  const std::int64_t e = ref.row_expert[row];
  float y = warp_dot(ref.h2 + static_cast<std::int64_t>(row) * ref.f,
                     ref.w2 + (e * ref.d + d) * ref.f, ref.f);
  if (ref.bias) y += ref.bias2[e * ref.d + d];
  if (threadIdx.x % 32 == 0) out[static_cast<std::int64_t>(blockIdx.y) * ref.d + d] = round_bf16(y);
}

float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

/// Compares rows and says where the first difference is.
bool compare(const std::string& what, const std::vector<__nv_bfloat16>& got,
             const std::vector<float>& want, const std::vector<int>& rows,
             const std::vector<int>& stored_rows, int width) {
  double square = 0;
  for (float v : want) square += static_cast<double>(v) * v;
  const double rms = std::sqrt(square / std::max<std::size_t>(1, want.size()));
  std::size_t bad = 0, exact = 0;
  double worst = 0, error = 0;
  std::string first;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int c = 0; c < width; ++c) {
      const float w = want[i * width + c];
      const float g = to_float(got[static_cast<std::size_t>(stored_rows[i]) * width + c]);
      const double difference = std::fabs(static_cast<double>(g) - w);
      exact += g == w;
      error += difference * difference;
      if (!(difference <= 0.02 * std::fabs(w) + 0.01 * rms)) {
        if (bad++ < 4) {
          first += " [row " + std::to_string(rows[i]) + " col " + std::to_string(c) + " got " +
                   std::to_string(g) + " want " + std::to_string(w) + "]";
        }
      }
      worst = std::max(worst, difference);
    }
  }
  std::printf("  %-5s %s bad %zu of %zu, exact %.4f, relative error %.2e%s\n", what.c_str(),
              bad == 0 ? "ok  " : "FAIL", bad, want.size(),
              static_cast<double>(exact) / std::max<std::size_t>(1, want.size()),
              std::sqrt(error / std::max(square, 1e-30)), first.c_str());
  return bad == 0;
}

}  // namespace

bool check(Problem& problem, int max_rows) {
  const ProblemShape& s = problem.shape;
  std::vector<int> rows;
  const int step = std::max(1, s.num_rows() / max_rows);
  for (int r = 0; r < s.num_rows(); r += step) rows.push_back(r);
  std::printf("%s: D %d F %d E %d R %d, %zu rows checked\n", s.name.c_str(), s.hidden_dim,
              s.intermediate_dim, s.num_experts(), s.num_rows(), rows.size());
  problem.h2.poison();
  problem.result.poison();
  problem.reset_counters(nullptr);
  problem.run_w13(nullptr);
  DISTMOE_BENCH_CUDA(cudaDeviceSynchronize());
  problem.run_w2(nullptr);
  DISTMOE_BENCH_CUDA(cudaDeviceSynchronize());
  if (rows.empty()) return true;

  const Reference ref = {
      problem.token_address.get(), problem.w13.get(),        problem.w2.get(), problem.bias13.get(),
      problem.bias2.get(),         problem.row_expert.get(), problem.h2.get(), s.hidden_dim,
      s.intermediate_dim,          s.is_interleaved,         s.is_clamped,     s.has_bias};
  DeviceArray<int> device_rows(rows);
  DeviceArray<float> want_h2(rows.size() * s.intermediate_dim);
  DeviceArray<float> want_result(rows.size() * s.hidden_dim);
  const auto count = static_cast<unsigned>(rows.size());
  reference_w13<<<dim3((s.intermediate_dim + 7) / 8, count), 256>>>(ref, device_rows.get(),
                                                                    want_h2.get());
  reference_w2<<<dim3((s.hidden_dim + 7) / 8, count), 256>>>(ref, device_rows.get(),
                                                             want_result.get());
  DISTMOE_BENCH_CUDA(cudaDeviceSynchronize());

  const std::vector<__nv_bfloat16> h2 = problem.h2.values();
  const std::vector<__nv_bfloat16> result = problem.result.values();
  std::vector<int> slots;
  for (int r : rows) slots.push_back(problem.result_slot[r]);
  bool ok = compare("w13", h2, want_h2.values(), rows, rows, s.intermediate_dim);
  ok = compare("w2", result, want_result.values(), rows, slots, s.hidden_dim) && ok;

  std::vector<bool> is_used(problem.num_result_rows, false);
  for (int slot : problem.result_slot) is_used[slot] = true;
  std::size_t stray = 0;
  for (int row = 0; row < problem.num_result_rows; ++row) {
    for (int c = 0; c < s.hidden_dim && !is_used[row]; ++c) {
      stray += !std::isnan(to_float(result[static_cast<std::size_t>(row) * s.hidden_dim + c]));
    }
  }
  for (std::size_t i = static_cast<std::size_t>(s.num_rows()) * s.intermediate_dim; i < h2.size();
       ++i) {
    stray += !std::isnan(to_float(h2[i]));
  }
  if (stray > 0) std::printf("  FAIL %zu elements written outside of the rows\n", stray);
  return ok && stray == 0;
}

}  // namespace distmoe::cuda::bench
