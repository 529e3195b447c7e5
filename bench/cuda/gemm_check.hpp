// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gemm_problem.hpp"

namespace distmoe::cuda::bench {

/// Runs both products on poisoned outputs and compares about `max_rows` rows with plain FP32
/// kernels that round where the library rounds. Prints a line per product.
bool check(Problem& problem, int max_rows);

}  // namespace distmoe::cuda::bench
