// Fused attention, and which calls of scaled_dot_product_attention get it.
#include "sim.h"

#include <ATen/Context.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

namespace sim {
namespace {

const c10::DispatchKeySet kAboveKernels = c10::autograd_dispatch_keyset_with_ADInplaceOrView;

// As on CUDA: the flash kernel takes half precision without a mask, and query heads that share a key head; the
// memory-efficient kernel takes float32 and masks, and as many key heads as query heads. All else takes `math`.
int64_t choose(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
    bool is_causal, std::optional<double>, bool) {
  bool has_mask = mask && mask->defined();
  bool fits = q.dim() == 4 && dropout == 0.0 && q.size(-1) == v.size(-1) && q.size(-2) && k.size(-2) && k.size(1) &&
      q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type() && !(is_causal && has_mask) &&
      !(has_mask && mask->requires_grad());
  bool flash = at::globalContext().userEnabledFlashSDP() && at::isReducedFloatingType(q.scalar_type()) && !has_mask &&
      k.size(1) == v.size(1) && k.size(1) && q.size(1) % k.size(1) == 0;
  bool efficient = at::globalContext().userEnabledMemEfficientSDP() && q.size(1) == k.size(1) && k.size(1) == v.size(1) &&
      q.scalar_type() != at::kDouble;
  return int64_t(fits && (flash || efficient) ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

at::Tensor repeat_heads(const at::Tensor& k, int64_t num_heads) {
  return k.size(1) == num_heads ? k : k.repeat_interleave(num_heads / k.size(1), 1);
}

at::Tensor sum_heads(const at::Tensor& grad, int64_t num_heads) {
  return grad.size(1) == num_heads ? grad : grad.unflatten(1, {num_heads, -1}).sum(2);
}

using Forward = std::tuple<
    at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Forward forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
  record("op", "attention");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(q.device().index());
  std::optional<at::Tensor> mask;
  if (bias && bias->defined()) mask = aliases.to_host(*bias);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      aliases.to_host(q), repeat_heads(aliases.to_host(k), q.size(1)), repeat_heads(aliases.to_host(v), q.size(1)), dropout,
      is_causal, mask, scale);
  at::Tensor none = aliases.to_device(at::zeros({1}, at::kLong));
  return {aliases.to_device(out), aliases.to_device(lse), none, none, q.size(2), k.size(2), none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    std::array<bool, 4>, const at::Tensor& out, const at::Tensor& lse, const at::Tensor&, const at::Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  record("op", "attention_backward");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(q.device().index());
  std::optional<at::Tensor> mask;
  if (bias.defined()) mask = aliases.to_host(bias);
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      aliases.to_host(grad), aliases.to_host(q), repeat_heads(aliases.to_host(k), q.size(1)),
      repeat_heads(aliases.to_host(v), q.size(1)), aliases.to_host(out), aliases.to_host(lse), dropout, is_causal, mask, scale);
  return {
      aliases.to_device(dq), aliases.to_device(sum_heads(dk, k.size(1))), aliases.to_device(sum_heads(dv, k.size(1))),
      at::Tensor()};
}

}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &sim::forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &sim::backward);
}
