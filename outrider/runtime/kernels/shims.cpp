// The kernels for programs that are compiled ahead of time: plain C functions over handles, as
// compile_cache.py declares them to the compiler, which calls them without the dispatcher.

#include <c10/util/SmallVector.h>

#include <cstdio>
#include <exception>

#include "elementwise.h"
#include "kernels.h"
#include "truncate.h"

using outrider::Tensor;

namespace {

Tensor tensor(AtenTensorHandle handle) { return Tensor::borrowed(handle); }

Tensor maybe(const AtenTensorHandle* handle) { return handle ? tensor(*handle) : Tensor(); }

c10::SmallVector<Tensor, 4> tensors(const AtenTensorHandle* handles, int64_t count) {
  c10::SmallVector<Tensor, 4> result;
  for (int64_t i = 0; i < count; i++) result.push_back(tensor(handles[i]));
  return result;
}

// Stores what `compute` returns; the caller turns the error code into an exception.
template <typename F>
AOTITorchError store(AtenTensorHandle* result, const F& compute) {
  try {
    *result = compute().release();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "outrider: %s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle x, AtenTensorHandle weight,
                                     const AtenTensorHandle* bias, int64_t outputs, int64_t widest,
                                     AtenTensorHandle* result) {
  return store(result, [&] {
    return outrider::linear(tensor(x), tensor(weight), maybe(bias), outputs, widest);
  });
}

AOTITorchError aoti_torch_cpu_linears(AtenTensorHandle x, const AtenTensorHandle* weights,
                                      int64_t num_weights, const AtenTensorHandle* biases,
                                      int64_t num_biases, const int64_t* outputs,
                                      int64_t num_outputs, int64_t widest,
                                      AtenTensorHandle* result) {
  return store(result, [&] {
    return outrider::linears(tensor(x), tensors(weights, num_weights), tensors(biases, num_biases),
                             outrider::Sizes(outputs, num_outputs), widest);
  });
}

AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle q, AtenTensorHandle k,
                                     AtenTensorHandle v, AtenTensorHandle mask, double scale,
                                     int64_t widest, AtenTensorHandle* result) {
  return store(result, [&] {
    return outrider::attend(tensor(q), tensor(k), tensor(v), tensor(mask), scale, widest);
  });
}

#define SHIM(name)                                                                     \
  AOTITorchError aoti_torch_cpu_##name(AtenTensorHandle x, AtenTensorHandle* result) { \
    return store(result, [&] { return outrider::name(tensor(x)); });                   \
  }
OUTRIDER_FUNCTIONS(SHIM)

AOTITorchError aoti_torch_cpu_mean(AtenTensorHandle x, int32_t keepdim, AtenTensorHandle* result) {
  return store(result, [&] { return outrider::mean(tensor(x), keepdim); });
}

AOTITorchError aoti_torch_cpu_layer_norm(AtenTensorHandle x, const AtenTensorHandle* weight,
                                         const AtenTensorHandle* bias, double eps,
                                         AtenTensorHandle* result) {
  return store(result, [&] {
    return outrider::layer_norm(tensor(x), maybe(weight), maybe(bias), eps);
  });
}

AOTITorchError aoti_torch_cpu_truncated(AtenTensorHandle p, AtenTensorHandle top_k,
                                        AtenTensorHandle top_p, AtenTensorHandle strict,
                                        AtenTensorHandle min_p, AtenTensorHandle* result) {
  return store(result, [&] {
    return outrider::truncated(tensor(p), tensor(top_k), tensor(top_p), tensor(strict),
                               tensor(min_p));
  });
}

}  // extern "C"
