// What every communicator shares: checks of arguments, and sums in rank order.
#pragma once

#include "core/tensor.h"

namespace bifocal {

// Throws unless whole holds `ranks` times the elements of part, both of one type.
void check_all_gather(const TensorView& whole, const ConstTensorView& part, int ranks);

// Throws unless whole holds `ranks` times the elements of part, whole is f64, f32 or bf16, and part
// is of that type or a wider real one.
void check_reduce_scatter(const TensorView& part, const ConstTensorView& whole, int ranks);

// Throws unless a sum over ranks is defined for this type: f64, f32, bf16 and i64.
void check_all_reduce(const TensorView& data);

// part [n] += slices[0] + slices[1] + ..., where slice r [n] of type `dtype` is rank r's. Summed in
// rank order: in double if either type is f64, else in float32, rounded once to part's type.
void add_in_rank_order(const TensorView& part, const void* slices, DType dtype, int ranks);

// The same with = in place of +=; slices are of data's type (i64 is summed exactly).
void sum_in_rank_order(const TensorView& data, const void* slices, int ranks);

}  // namespace bifocal
