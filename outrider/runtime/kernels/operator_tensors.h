// Tensors as operators of torch take and return them, by torch's stable interface.

#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "tensor.h"

namespace outrider {

namespace stable = torch::stable::detail;  // from() and to() convert what operators take and return

using Shared = torch::stable::Tensor;
using Maybe = std::optional<Shared>;

inline Tensor of(const Shared& x) { return Tensor::borrowed(x.get()); }

inline Tensor of(const Maybe& x) { return x ? of(*x) : Tensor(); }

inline c10::SmallVector<Tensor, 4> of(const std::vector<Shared>& each) {
  c10::SmallVector<Tensor, 4> result;
  for (const Shared& x : each) result.push_back(of(x));
  return result;
}

inline Shared shared(Tensor x) { return Shared(x.release()); }

}  // namespace outrider
