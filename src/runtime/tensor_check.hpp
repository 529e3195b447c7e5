// SPDX-License-Identifier: Apache-2.0
//
// What every tensor of a call must be. Each throws invalid_argument with the tensor's name, what
// was given and what is legal.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "distmoe/tensor.hpp"

namespace distmoe {

class ContextImpl;

void check_shape(const char* name, const TensorView& tensor,
                 std::initializer_list<std::int64_t> shape);
void check_dtype(const char* name, const TensorView& tensor, DType first, DType second);
/// Where the context is, not null, aligned to its elements.
void check_memory(const ContextImpl& context, const char* name, const TensorView& tensor);
/// CUDA kernels move rows in pieces of 16 bytes: unsupported where rows start elsewhere.
void check_vector_rows(const ContextImpl& context, const char* name, const TensorView& rows);
/// CUDA kernels find weights through tensor maps, which know strides of some bits alone:
/// unsupported for others.
void check_weight_strides(const ContextImpl& context, const char* name, const TensorView& weights);
/// The elements of a row lie together; rows may be apart.
void check_row_major(const char* name, const TensorView& tensor);
void check_contiguous(const char* name, const TensorView& tensor);
/// BF16 [tokens, D] that is read; rows may be strided.
void check_input_rows(const ContextImpl& context, const char* name, const TensorView& rows,
                      std::int64_t tokens);
/// The same, written: rows must not overlap, which would be a race.
void check_output_rows(const ContextImpl& context, const char* name, const TensorView& rows,
                       std::int64_t tokens);

}  // namespace distmoe
