// The kernels as operators of torch, which operators.py defines, and what they leave to torch's own:
// by torch's stable interface, whose headers are short.

#include <array>
#include <vector>

#include "elementwise.h"
#include "kernels.h"
#include "move_slots.h"
#include "operator_tensors.h"
#include "truncate.h"

namespace outrider {

namespace {

// An operator of torch that returns one tensor.
template <typename... Arguments>
Shared by_torch(const char* name, const Arguments&... arguments) {
  std::array stack{stable::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return stable::to<Shared>(stack[0]);
}

}  // namespace

Tensor linears_by_torch(const Tensor& x, Tensors weights, Tensors biases) {
  const auto converted_to = [&](const Tensor& each) {
    return shared(converted(Tensor::borrowed(each.handle()), x.scalar_type()));
  };
  const Shared input = converted_to(x);
  std::vector<Shared> results;
  for (size_t i = 0; i < weights.size(); i++) {
    const Shared weight = converted_to(weights[i]);
    const Maybe bias = biases.empty() ? std::nullopt : Maybe(converted_to(biases[i]));
    results.push_back(by_torch("aten::linear", input, weight, bias));
  }
  const Shared result =
      results.size() == 1 ? results[0] : by_torch("aten::cat", results, int64_t{-1});
  return Tensor::owned(of(result).release());
}

namespace {

Shared linear_operator(const Shared& x, const Shared& weight, const Maybe& bias, int64_t outputs,
                       int64_t widest) {
  return shared(linear(of(x), of(weight), of(bias), outputs, widest));
}

Shared linears_operator(const Shared& x, const std::vector<Shared>& weights,
                        const std::vector<Shared>& biases, const std::vector<int64_t>& outputs,
                        int64_t widest) {
  return shared(linears(of(x), of(weights), of(biases), outputs, widest));
}

Shared attend_operator(const Shared& q, const Shared& k, const Shared& v, const Shared& mask,
                       double scale, int64_t widest) {
  return shared(attend(of(q), of(k), of(v), of(mask), scale, widest));
}

#define OPERATOR(name) \
  Shared name##_operator(const Shared& x) { return shared(name(of(x))); }
OUTRIDER_FUNCTIONS(OPERATOR)

Shared mean_operator(const Shared& x, bool keepdim) { return shared(mean(of(x), keepdim)); }

Shared layer_norm_operator(const Shared& x, const Maybe& weight, const Maybe& bias, double eps) {
  return shared(layer_norm(of(x), of(weight), of(bias), eps));
}

Shared truncated_operator(const Shared& p, const Shared& top_k, const Shared& top_p,
                          const Shared& strict, const Shared& min_p) {
  return shared(truncated(of(p), of(top_k), of(top_p), of(strict), of(min_p)));
}

void move_slots_operator(const std::vector<Shared>& buffers, const std::vector<int64_t>& lengths,
                         const Shared& index, int64_t first) {
  move_slots(of(buffers), lengths, of(index), first);
}

}  // namespace

}  // namespace outrider

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
#define IMPLEMENT(name) library.impl(#name, TORCH_BOX(&outrider::name##_operator));
  IMPLEMENT(linear)
  IMPLEMENT(linears)
  IMPLEMENT(attend)
  OUTRIDER_FUNCTIONS(IMPLEMENT)
  IMPLEMENT(mean)
  IMPLEMENT(layer_norm)
  IMPLEMENT(truncated)
  IMPLEMENT(move_slots)
}
