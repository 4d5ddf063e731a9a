// Moves tokens within KV buffers.
//
// Legend: B rows, H heads, S slots, C width of a head, D moved tokens.

#pragma once

#include "tensor.h"

namespace outrider {

// Copies, in every buffer (B, H, S, C) of any dtype, the slots `lengths` + `index` (B, D) of each row
// to the slots from `lengths` + `first` on. Reads all of a row's slots before it writes any.
void move_slots(Tensors buffers, Sizes lengths, const Tensor& index, int64_t first);

}  // namespace outrider
