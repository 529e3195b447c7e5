// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace distmoe::cuda {

/// The id of a route, token * K + k, of the caller's tensor in `args`. In the integers of `route`.
template <typename Args, typename Route>
__device__ __forceinline__ std::int64_t load_id(const Args& args, Route route) {
  const std::int64_t offset =
      route / args.top_k * args.id_token_stride + route % args.top_k * args.id_k_stride;
  return args.ids_are_64_bit != 0 ? static_cast<const std::int64_t*>(args.ids)[offset]
                                  : static_cast<const std::int32_t*>(args.ids)[offset];
}

}  // namespace distmoe::cuda
