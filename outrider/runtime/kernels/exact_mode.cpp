// Exact mode: while it is on in a thread, the functions of elementwise.h stand in for torch's own,
// whatever code calls them. All other operators run as usual.
//
// The mode is a dispatch key that precedes all others and falls through to them (operators.py). torch
// reserves this key for modes of third parties in tests, and does not use it itself.

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <string>
#include <vector>

#include "elementwise.h"
#include "operator_tensors.h"

namespace outrider {

namespace {

constexpr auto kExact = c10::DispatchKey::TESTING_ONLY_GenericMode;

// The arguments of an operator, whose place its result takes.
using Stack = StableIValue*;

void store(Stack stack, Tensor result) { stack[0] = stable::from(shared(std::move(result))); }

// Puts arguments back that were taken from the stack.
template <typename... Arguments>
void give_back(Stack stack, const Arguments&... arguments) {
  ((*stack++ = stable::from(arguments)), ...);
}

bool is_ours(const Shared& x) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const bool known = dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_bfloat16();
  return known && x.is_cpu();
}

// Runs torch's own operator.
void by_torch(const char* name, const char* overload, Stack stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kExact);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION));
}

// Each of these runs our kernel in place of an operator of torch, or the operator itself for tensors
// that the kernel does not take.

#define STAND_IN(name)                                 \
  void exact_##name(Stack stack, uint64_t, uint64_t) { \
    const auto x = stable::to<Shared>(stack[0]);       \
    if (is_ours(x)) return store(stack, name(of(x)));  \
    give_back(stack, x);                               \
    by_torch("aten::" #name, "", stack);               \
  }
STAND_IN(exp)
STAND_IN(tanh)
STAND_IN(sin)
STAND_IN(cos)
STAND_IN(sigmoid)
STAND_IN(silu)

void exact_gelu(Stack stack, uint64_t, uint64_t) {
  const auto x = stable::to<Shared>(stack[0]);
  const auto approximate = stable::to<std::string>(stack[1]);
  if (is_ours(x)) return store(stack, approximate == "tanh" ? gelu_tanh(of(x)) : gelu(of(x)));
  give_back(stack, x, approximate);
  by_torch("aten::gelu", "", stack);
}

void exact_mean(Stack stack, uint64_t, uint64_t) {
  const auto x = stable::to<Shared>(stack[0]);
  const auto dim = stable::to<std::optional<std::vector<int64_t>>>(stack[1]);
  const auto keepdim = stable::to<bool>(stack[2]);
  const auto dtype = stable::to<std::optional<c10::ScalarType>>(stack[3]);
  const bool last = dim && dim->size() == 1 && (dim->front() == -1 || dim->front() == x.dim() - 1);
  if (is_ours(x) && last && !dtype) return store(stack, mean(of(x), keepdim));
  give_back(stack, x, dim, keepdim, dtype);
  by_torch("aten::mean", "dim", stack);
}

void exact_layer_norm(Stack stack, uint64_t, uint64_t) {
  const auto x = stable::to<Shared>(stack[0]);
  const auto shape = stable::to<std::vector<int64_t>>(stack[1]);
  const auto weight = stable::to<Maybe>(stack[2]), bias = stable::to<Maybe>(stack[3]);
  const auto eps = stable::to<double>(stack[4]);
  if (is_ours(x) && shape.size() == 1)
    return store(stack, layer_norm(of(x), of(weight), of(bias), eps));
  give_back(stack, x, shape, weight, bias);
  by_torch("aten::layer_norm", "", stack);
}

}  // namespace

}  // namespace outrider

// Turns the mode on or off in this thread; returns what it was.
extern "C" bool outrider_set_exact_mode(bool on) {
  const bool before = c10::impl::tls_is_dispatch_key_included(outrider::kExact);
  c10::impl::tls_set_dispatch_key_included(outrider::kExact, on);
  return before;
}

extern "C" bool outrider_is_exact_mode() {
  return c10::impl::tls_is_dispatch_key_included(outrider::kExact);
}

STABLE_TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("exp", &outrider::exact_exp);
  library.impl("tanh", &outrider::exact_tanh);
  library.impl("sin", &outrider::exact_sin);
  library.impl("cos", &outrider::exact_cos);
  library.impl("sigmoid", &outrider::exact_sigmoid);
  library.impl("silu", &outrider::exact_silu);
  library.impl("gelu", &outrider::exact_gelu);
  library.impl("mean.dim", &outrider::exact_mean);
  library.impl("layer_norm", &outrider::exact_layer_norm);
}
