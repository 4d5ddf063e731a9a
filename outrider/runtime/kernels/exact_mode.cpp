// Exact mode: while it is on in a thread, the functions of elementwise.h stand in for torch's own,
// whatever code calls them. All other operators run as usual.
//
// The mode is a dispatch key that precedes all others and falls through to them. torch reserves this
// key for modes of third parties in tests, and does not use it itself.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "elementwise.h"

namespace outrider {

constexpr auto kExact = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Turns the mode on or off in this thread; returns what it was.
static bool set_exact_mode(bool on) {
  const bool before = c10::impl::tls_is_dispatch_key_included(kExact);
  c10::impl::tls_set_dispatch_key_included(kExact, on);
  return before;
}

static bool is_exact_mode() { return c10::impl::tls_is_dispatch_key_included(kExact); }

static bool is_ours(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  return x.device().is_cpu() && (dtype == at::kFloat || dtype == at::kBFloat16);
}

// Runs our kernel in place of an operator of torch, or the operator itself for tensors that the
// kernel does not take.
template <typename Ours, typename Theirs>
static at::Tensor stand_in(const at::Tensor& x, const Ours& ours, const Theirs& theirs) {
  if (is_ours(x)) return ours(x);
  c10::impl::ExcludeDispatchKeyGuard guard(kExact);
  return theirs();
}

#define STAND_IN(name) \
  static at::Tensor exact_##name(const at::Tensor& x) { \
    return stand_in(x, outrider::name, [&] { return at::name(x); }); \
  }
STAND_IN(exp)
STAND_IN(tanh)
STAND_IN(sin)
STAND_IN(cos)
STAND_IN(sigmoid)
STAND_IN(silu)

static at::Tensor exact_gelu(const at::Tensor& x, c10::string_view approximate) {
  const auto theirs = [&] { return at::gelu(x, approximate); };
  return stand_in(x, approximate == "tanh" ? outrider::gelu_tanh : outrider::gelu, theirs);
}

static at::Tensor exact_mean(const at::Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
                             std::optional<at::ScalarType> dtype) {
  const bool last = dim && dim->size() == 1 && (dim->front() == -1 || dim->front() == x.dim() - 1);
  if (is_ours(x) && last && !dtype) return outrider::mean(x, keepdim);
  c10::impl::ExcludeDispatchKeyGuard guard(kExact);
  return at::mean(x, dim, keepdim, dtype);
}

static at::Tensor exact_layer_norm(const at::Tensor& x, c10::SymIntArrayRef shape,
                                   const std::optional<at::Tensor>& weight,
                                   const std::optional<at::Tensor>& bias, double eps, bool enable) {
  if (is_ours(x) && shape.size() == 1) return outrider::layer_norm(x, weight, bias, eps);
  c10::impl::ExcludeDispatchKeyGuard guard(kExact);
  return at::layer_norm_symint(x, shape, weight, bias, eps, enable);
}

}  // namespace outrider

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("set_exact_mode(bool on) -> bool", &outrider::set_exact_mode);
  library.def("is_exact_mode() -> bool", &outrider::is_exact_mode);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
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
