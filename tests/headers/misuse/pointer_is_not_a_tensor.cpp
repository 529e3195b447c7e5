// SPDX-License-Identifier: Apache-2.0
//
// A view needs a type and a shape: an address alone says nothing.
#include "distmoe/tensor.hpp"

distmoe::TensorView view(float* data) {
#ifdef MISUSE
  return data;
#else
  return {data, distmoe::DType::kF32, {4, 8}};
#endif
}
