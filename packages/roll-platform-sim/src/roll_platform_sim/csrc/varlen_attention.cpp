// Flash attention of sequences laid end to end, with windows and with query heads that share a key head: the operators
// below torch.nn.attention.varlen and roll_modeling.varlen_attention.
//
// Shapes: T tokens, H query heads, K key heads, D head size; L queries and S keys of one sequence.
#include "sim.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <functional>
#include <limits>

namespace sim {
namespace {

using Size = std::optional<c10::SymInt>;
using Optional = std::optional<at::Tensor>;

const c10::DispatchKeySet kAboveKernels = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kLargestHead = 256;

int64_t number(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

struct Span {
  int64_t first, num;
  at::Tensor of(const at::Tensor& t) const { return t.narrow(0, first, num); }
};

// One call of the kernel, with the host's aliases of its tensors.
struct Call {
  at::Tensor q, k, v;             // [T, H, D], [T, K, D] and [T, K, D]
  at::Tensor q_bounds, k_bounds;  // the first token of each sequence, and T
  int64_t longest_q, longest_k;
  double scale;
  int64_t left, right;  // numbers of keys before and after its own that a query sees; -1 for all

  void check(double dropout) const {
    TORCH_CHECK(at::isReducedFloatingType(q.scalar_type()), "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(q.dtype() == k.dtype() && q.dtype() == v.dtype(), "query, key and value must have the same dtype");
    TORCH_CHECK(q.dim() == 3 && k.sizes() == v.sizes() && q.size(2) == k.size(2), "q, k and v do not fit together");
    TORCH_CHECK(q.size(2) % 8 == 0 && q.size(2) <= kLargestHead, "head_size should be a multiple of 8, at most 256");
    TORCH_CHECK(q.size(1) % k.size(1) == 0, "Number of heads in key/value must divide number of heads in query");
    for (const at::Tensor& t : {q, k, v}) TORCH_CHECK(t.stride(2) == 1, "the last dimension must be contiguous");
    for (const at::Tensor& t : {q_bounds, k_bounds}) TORCH_CHECK(t.dtype() == at::kInt, "bounds must have dtype int32");
    TORCH_CHECK(dropout == 0.0, "dropout is not simulated");
  }

  at::Tensor queries(const at::Tensor& t, Span span) const { return span.of(t).to(at::kFloat).transpose(0, 1); }
  at::Tensor keys(const at::Tensor& t, Span span) const {
    return span.of(t).to(at::kFloat).repeat_interleave(q.size(1) / k.size(1), 1).transpose(0, 1);
  }
  at::Tensor sum_shared(const at::Tensor& grad) const {
    return grad.transpose(0, 1).unflatten(1, {k.size(1), -1}).sum(2);
  }

  // Calls `compute` for each sequence with its queries, its keys and their masked scores [H, L, S].
  void each_sequence(const std::function<void(Span, Span, const at::Tensor&)>& compute) const {
    const int* q_bound = q_bounds.const_data_ptr<int>();
    const int* k_bound = k_bounds.const_data_ptr<int>();
    for (int64_t i = 0; i + 1 < q_bounds.numel(); ++i) {
      Span qs{q_bound[i], q_bound[i + 1] - q_bound[i]}, ks{k_bound[i], k_bound[i + 1] - k_bound[i]};
      TORCH_CHECK(qs.num <= longest_q && ks.num <= longest_k, "a sequence is longer than max_q or max_k");
      if (!qs.num || !ks.num) continue;
      at::Tensor ahead = at::arange(ks.num) - at::arange(qs.num).unsqueeze(1) - (ks.num - qs.num);
      at::Tensor hidden = at::zeros_like(ahead, at::kBool);
      if (right >= 0) hidden.logical_or_(ahead > right);
      if (left >= 0) hidden.logical_or_(ahead < -left);
      at::Tensor scores = at::matmul(queries(q, qs), keys(k, ks).mT()).mul_(scale);
      compute(qs, ks, scores.masked_fill_(hidden, -kInfinity));
    }
  }
};

Call make_call(
    Aliases& aliases, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& q_bounds,
    const at::Tensor& k_bounds, const c10::SymInt& longest_q, const c10::SymInt& longest_k, double dropout,
    bool is_causal, std::optional<double> scale, const Size& left, const Size& right) {
  Call call{
      aliases.to_host(q), aliases.to_host(k), aliases.to_host(v), aliases.to_host(q_bounds), aliases.to_host(k_bounds),
      number(longest_q), number(longest_k), scale.value_or(1.0 / std::sqrt(double(q.size(-1)))),
      left ? number(*left) : -1, is_causal ? 0 : right ? number(*right) : -1};
  call.check(dropout);
  return call;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Optional& q_bounds, const Optional& k_bounds,
    c10::SymInt longest_q, c10::SymInt longest_k, double dropout, bool is_causal, bool, std::optional<double> scale,
    Size left, Size right, const Optional& used_k, const Optional& slopes, const Optional& blocks,
    std::optional<int64_t>) {
  record("op", "aten::_flash_attention_forward");
  TORCH_CHECK(q_bounds && k_bounds && !used_k && !slopes && !blocks, "only sequences laid end to end are simulated");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(q.device().index());
  Call call = make_call(
      aliases, q, k, v, *q_bounds, *k_bounds, longest_q, longest_k, dropout, is_causal, scale, left, right);
  at::Tensor out = at::zeros_like(call.q), lse = at::full({q.size(1), q.size(0)}, -kInfinity, at::kFloat);
  call.each_sequence([&](Span qs, Span ks, const at::Tensor& scores) {
    lse.narrow(1, qs.first, qs.num).copy_(scores.logsumexp(-1));
    qs.of(out).copy_(at::matmul(scores.softmax(-1), call.keys(call.v, ks)).transpose(0, 1));
  });
  auto empty = [&](at::IntArrayRef size, at::ScalarType dtype) { return aliases.to_device(at::zeros(size, dtype)); };
  return {
      aliases.to_device(out), aliases.to_device(lse), empty({2}, at::kUInt64), empty({}, at::kUInt64),
      empty({0}, out.scalar_type())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const at::Tensor& q_bounds, const at::Tensor& k_bounds, c10::SymInt longest_q,
    c10::SymInt longest_k, double dropout, bool is_causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale, Size left, Size right) {
  record("op", "aten::_flash_attention_backward");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(q.device().index());
  Call call = make_call(
      aliases, q, k, v, q_bounds, k_bounds, longest_q, longest_k, dropout, is_causal, scale, left, right);
  at::Tensor grads = aliases.to_host(grad), outputs = aliases.to_host(out), lses = aliases.to_host(lse);
  at::Tensor dq = at::zeros_like(call.q), dk = at::zeros_like(call.k), dv = at::zeros_like(call.v);
  call.each_sequence([&](Span qs, Span ks, const at::Tensor& scores) {
    // Weights are recomputed from the LSE of the forward pass, as in the kernels.
    at::Tensor weights = (scores - lses.narrow(1, qs.first, qs.num).unsqueeze(-1)).exp();
    at::Tensor d_out = call.queries(grads, qs), delta = (d_out * call.queries(outputs, qs)).sum(-1, true);
    at::Tensor d_scores = weights * (at::matmul(d_out, call.keys(call.v, ks).mT()) - delta) * call.scale;
    qs.of(dq).copy_(at::matmul(d_scores, call.keys(call.k, ks)).transpose(0, 1));
    ks.of(dk).copy_(call.sum_shared(at::matmul(d_scores.mT(), call.queries(call.q, qs))));
    ks.of(dv).copy_(call.sum_shared(at::matmul(weights.mT(), d_out)));
  });
  return {aliases.to_device(dq), aliases.to_device(dk), aliases.to_device(dv)};
}

}  // namespace
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_flash_attention_forward", &sim::forward);
  m.impl("_flash_attention_backward", &sim::backward);
}
