// The names of all operators, and what the kernels leave to torch.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <vector>

#include "allocate.h"
#include "elementwise.h"
#include "kernels.h"
#include "move_slots.h"
#include "packing.h"
#include "pages.h"
#include "truncate.h"

namespace outrider {

at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) { return at::empty(sizes, dtype); }

at::Tensor linears_by_torch(const at::Tensor& x, at::TensorList weights, at::TensorList biases) {
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < weights.size(); i++)
    results.push_back(at::linear(x, weights[i].to(x.scalar_type()),
                                 biases.empty() ? std::nullopt : std::optional(biases[i])));
  return results.size() == 1 ? results[0] : at::cat(results, -1);
}

}  // namespace outrider

TORCH_LIBRARY(outrider, library) {
  library.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, int outputs, int widest) -> Tensor");
  library.def(
      "linears(Tensor x, Tensor[] weights, Tensor[] biases, int[] outputs, int widest) -> Tensor");
  library.def("attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, "
              "int widest=9223372036854775807) -> Tensor",
              {at::Tag::flexible_layout});  // else programs compute the mask in each layer
  library.def("pack(Tensor weight, bool keep_dtype) -> Tensor");
  library.def("pack_int8(Tensor weight, Tensor scale) -> Tensor");
  library.def("pack_groups(Tensor values, Tensor scale, Tensor? offset, int bits) -> Tensor");
  library.def(
      "pack_integer_dots(Tensor values, Tensor scale, Tensor? offset, int bits) -> Tensor");
  library.def("pages(int bytes) -> Tensor", &outrider::pages);
#define DEFINE(name) library.def(#name "(Tensor x) -> Tensor");
  OUTRIDER_FUNCTIONS(DEFINE)
  library.def("mean(Tensor x, bool keepdim) -> Tensor");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  library.def(
      "truncated(Tensor p, Tensor top_k, Tensor top_p, Tensor strict, Tensor min_p) -> Tensor");
  library.def("move_slots(Tensor(a!)[] buffers, int[] lengths, Tensor index, int first) -> ()");
}

TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("linear", &outrider::linear);
  library.impl("linears", &outrider::linears);
  library.impl("attend", &outrider::attend);
  library.impl("pack", &outrider::pack);
  library.impl("pack_int8", &outrider::pack_int8);
  library.impl("pack_groups", &outrider::pack_groups);
  library.impl("pack_integer_dots", &outrider::pack_integer_dots);
#define IMPLEMENT(name) library.impl(#name, &outrider::name);
  OUTRIDER_FUNCTIONS(IMPLEMENT)
  library.impl("mean", &outrider::mean);
  library.impl("layer_norm", &outrider::layer_norm);
  library.impl("truncated", &outrider::truncated);
  library.impl("move_slots", &outrider::move_slots);
}
