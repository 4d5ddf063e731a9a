// The kernels for programs that are compiled ahead of time: plain C functions over handles, as
// compile_cache.py declares them to the compiler, which calls them without the dispatcher.

#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "elementwise.h"
#include "kernels.h"
#include "truncate.h"

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::tensor_handle_to_tensor_pointer;

namespace {

const at::Tensor& tensor(AtenTensorHandle handle) {
  return *tensor_handle_to_tensor_pointer(handle);
}

std::vector<at::Tensor> tensors(const AtenTensorHandle* handles, int64_t count) {
  std::vector<at::Tensor> result;
  result.reserve(count);
  for (int64_t i = 0; i < count; i++) result.push_back(tensor(handles[i]));
  return result;
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle x, AtenTensorHandle weight,
                                     const AtenTensorHandle* bias, int64_t outputs, int64_t widest,
                                     AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    std::optional<at::Tensor> maybe;
    if (bias) maybe = tensor(*bias);
    *result = new_tensor_handle(
        outrider::linear(tensor(x), tensor(weight), maybe, outputs, widest));
  });
}

AOTITorchError aoti_torch_cpu_linears(AtenTensorHandle x, const AtenTensorHandle* weights,
                                      int64_t num_weights, const AtenTensorHandle* biases,
                                      int64_t num_biases, const int64_t* outputs,
                                      int64_t num_outputs, int64_t widest,
                                      AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(outrider::linears(
        tensor(x), tensors(weights, num_weights), tensors(biases, num_biases),
        at::IntArrayRef(outputs, num_outputs), widest));
  });
}

AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle q, AtenTensorHandle k,
                                     AtenTensorHandle v, AtenTensorHandle mask, double scale,
                                     int64_t widest, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(
        outrider::attend(tensor(q), tensor(k), tensor(v), tensor(mask), scale, widest));
  });
}

#define SHIM(name)                                                                          \
  AOTITorchError aoti_torch_cpu_##name(AtenTensorHandle x, AtenTensorHandle* result) {      \
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({                                            \
      *result = new_tensor_handle(outrider::name(tensor(x)));   \
    });                                                                                     \
  }
OUTRIDER_FUNCTIONS(SHIM)

AOTITorchError aoti_torch_cpu_mean(AtenTensorHandle x, int32_t keepdim, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE(
      { *result = new_tensor_handle(outrider::mean(tensor(x), keepdim)); });
}

AOTITorchError aoti_torch_cpu_layer_norm(AtenTensorHandle x, const AtenTensorHandle* weight,
                                         const AtenTensorHandle* bias, double eps,
                                         AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto maybe = [](const AtenTensorHandle* each) {
      return each ? std::optional(tensor(*each)) : std::nullopt;
    };
    *result = new_tensor_handle(
        outrider::layer_norm(tensor(x), maybe(weight), maybe(bias), eps));
  });
}

AOTITorchError aoti_torch_cpu_truncated(AtenTensorHandle p, AtenTensorHandle top_k,
                                        AtenTensorHandle top_p, AtenTensorHandle strict,
                                        AtenTensorHandle min_p, AtenTensorHandle* result) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(outrider::truncated(tensor(p), tensor(top_k), tensor(top_p),
                                                    tensor(strict), tensor(min_p)));
  });
}

}  // extern "C"
