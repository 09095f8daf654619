// Operators: CPU kernels on host tensors with the devices' memory, after the checks that CUDA makes.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace sim {
namespace {

using c10::IValue;
using Stack = std::vector<IValue>;
using Names = std::unordered_set<std::string_view>;

const c10::DispatchKeySet kAboveKernels =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// `aten::add` without its namespace and the underscore of the in-place form: `add`.
std::string_view plain_name(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().operator_name().name;
  if (name.substr(0, 6) != "aten::") return {};
  return name.substr(6, name.size() - 6 - (name.back() == '_'));
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return made;
}

c10::Storage host_storage(const c10::Storage& device, bool keeps_alive) {
  auto* kept = keeps_alive ? new c10::Storage(device) : nullptr;
  c10::DataPtr data(
      device.mutable_data(), kept, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), device.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true};
}

// -- what CUDA refuses ------------------------------------------------------------------------------------------------

// The device of a call's tensors. Like TensorIterator, pointwise operators take numbers of the host beside tensors of a
// device, and indexing takes index tensors of the host.
struct DeviceCheck {
  std::string_view name;
  bool takes_numbers, takes_indices;
  int device = -1;
  bool has_masks = false;  // masks as indices: their result has a size for which the host waits

  explicit DeviceCheck(const c10::OperatorHandle& op) : name(plain_name(op)) {
    static const Names indexing{"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"};
    static const Names more{"fill", "masked_fill", "index_fill", "rsub", "floor_divide", "complex", "polar", "isin", "linspace",
                            "logspace"};  // pointwise as well, without the tag
    takes_indices = indexing.count(name);
    takes_numbers = takes_indices || op.hasTag(at::Tag::pointwise) || more.count(name) || name.substr(0, 8) == "_foreach" ||
        name.substr(0, 6) == "_fused";
  }

  void operator()(const at::Tensor& t, bool is_index = false) {
    if (!t.defined()) return;
    if (on_device(t)) {
      int index = t.device().index();
      TORCH_CHECK(
          device < 0 || device == index, "Expected all tensors to be on the same device, but found at least two devices, ",
          kDevice, ":", device, " and ", t.device(), "! (when calling ", name, ")");
      device = index;
    } else if (is_index && t.dim()) {
      record("h2d", "index", int64_t(t.nbytes()));
    } else {
      TORCH_CHECK(
          takes_numbers && t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
          kDevice, " and ", t.device(), "! (when calling ", name, " with a tensor of sizes ", t.sizes(), " on ", t.device(), ")");
    }
    has_masks = has_masks || (is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte));
  }
};

// Operators that raise under torch.use_deterministic_algorithms(True) with tensors of CUDA: its documentation lists them.
void check_deterministic(std::string_view name, c10::ArrayRef<IValue> arguments) {
  if (!at::globalContext().deterministicAlgorithms()) return;
  static const Names always{
      "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "_ctc_loss_backward", "_upsample_bicubic2d_aa_backward",
      "_upsample_bilinear2d_aa_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward", "fractional_max_pool2d_backward",
      "fractional_max_pool3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "max_unpool2d", "max_unpool3d",
      "nll_loss2d_forward", "put", "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
      "upsample_bicubic2d_backward", "upsample_bilinear2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward"};
  static const Names of_numbers{"cumsum", "histc"};  // of floating point or complex numbers
  auto is_given = [&](size_t index) { return arguments[index].isTensor() && arguments[index].toTensor().defined(); };
  bool raises = always.count(name) ||
      (of_numbers.count(name) && !at::isIntegralType(arguments[0].toTensor().scalar_type(), /*includeBool=*/true)) ||
      (name == "bincount" && is_given(1)) ||                                                        // weights
      (name == "_embedding_bag_backward" && arguments[8].toInt() == 2) ||                           // mode: max
      ((name == "median" || name == "nanmedian") && arguments.size() > 1) ||                         // with indices
      (name == "scatter_reduce" && arguments[4].isString() && arguments[4].toStringRef() == "prod");
  if (raises) at::globalContext().alertNotDeterministic(std::string(name) + " on CUDA");
}

bool is_product(std::string_view name) {
  static const Names products{"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "ger", "addr"};
  return products.count(name);
}

// -- the fallback -----------------------------------------------------------------------------------------------------
// Replaces every tensor of an argument or a result.
template <class Map>
void map_tensors(IValue& value, Map map) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = map(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& t : value.toTensorList()) mapped.push_back(map(t));
    value = std::move(mapped);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      mapped.push_back(t ? std::optional<at::Tensor>(map(*t)) : t);
    value = std::move(mapped);
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  IValue* arguments = stack->data() + stack->size() - parameters.size();
  IValue* end = stack->data() + stack->size();

  DeviceCheck check(op);
  int requested = current_device();  // of operators that make tensors
  for (IValue* value = arguments; value < end; ++value) {
    bool are_indices = check.takes_indices && value->isOptionalTensorList();
    map_tensors(*value, [&](const at::Tensor& t) {
      check(t, are_indices);
      TORCH_CHECK_NOT_IMPLEMENTED(
          !is_product(check.name) || !at::isIntegralType(t.scalar_type(), /*includeBool=*/true), "\"", check.name,
          "\" not implemented for '", t.scalar_type(), "'");
      return t;
    });
    if (value->isDevice() && value->toDevice().type() == kDevice && value->toDevice().has_index())
      requested = value->toDevice().index();
  }
  int device = check.device < 0 ? requested : check.device;
  record("op", schema.operator_name().name);
  check_deterministic(check.name, c10::ArrayRef<IValue>(arguments, parameters.size()));
  // Before `index` runs, torch has turned masks into numbers by `nonzero`.
  bool waits = check.name == "index" ? false
      : check.takes_indices          ? check.has_masks
                                     : op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  if (waits) {
    record("wait", check.name);
    wait_for(device);
  }

  Aliases aliases(device);
  for (size_t i = 0; i < parameters.size(); ++i) {
    IValue& value = arguments[i];
    static const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());
    map_tensors(value, [&](const at::Tensor& t) { return on_device(t) ? aliases.to_host(t) : t; });
    if (value.isGenerator()) {
      value = generator_on_host(value.toGenerator());
    } else if (value.isNone() && *parameters[i].type() == *optional_generator) {
      value = generator_on_host(default_generator(device));
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      value = c10::Device(c10::kCPU);
    }
  }
  {
    c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    map_tensors((*stack)[i], [&](const at::Tensor& t) { return aliases.to_device(t); });
}

// -- operators that the CPU's kernels cannot stand for ----------------------------------------------------------------
c10::Device indexed(std::optional<c10::Device> device) {
  return {kDevice, device && device->has_index() ? device->index() : c10::DeviceIndex(current_device())};
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(indexed(device));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(indexed(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kDevice, "set_: expected a storage on a device, got one on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto num = int64_t(source.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(source), 0, {num}, {1});
}

void copy_now(const at::Tensor& to, const at::Tensor& from) {
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(-1);
  at::Tensor host = on_device(to) ? aliases.to_host(to) : to;
  host.copy_(on_device(from) ? aliases.to_host(from) : from);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.is_same(from) || !to.numel()) return to;
  check_usable();
  auto num_bytes = int64_t(to.numel() * from.itemsize());
  if (on_device(to) && on_device(from)) {
    bool is_local = to.device() == from.device();
    record(is_local ? "op" : "d2d", "aten::copy_", num_bytes);
    copy_now(to, from);
    return to;
  }
  const at::Tensor& host = on_device(to) ? from : to;
  bool pinned = host.numel() && is_pinned(host.storage().data());
  bool late = pinned && non_blocking && to.sizes() == from.sizes() && (on_device(to) || to.is_contiguous());
  record(on_device(to) ? "h2d" : "d2h", late ? "copy" : pinned ? "copy, blocking" : "copy of pageable memory, blocking", num_bytes);
  if (late) {
    on_device(to) ? copy_to_device_later(to, from) : copy_to_host_later(to, from);
  } else {
    if (on_device(from)) wait_for(from.device().index());
    copy_now(to, from);
  }
  return to;
}

void record_stream(at::Tensor&, at::Stream) {}

// `parameter.data = ` and `Module.to` keep the parameter when it moves between host and device, as on CUDA: ties stay.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || on_device(t)); };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

// Zeros that take no memory do not reach kernels as such.
at::Tensor efficient_zero_tensor(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin) {
  return empty(size, dtype, layout, device, pin, std::nullopt).zero_();
}

// CPUs have no histograms of integers.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  record("op", "aten::histc");
  check_deterministic("histc", IValue(self));
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(self.device().index());
  at::Tensor host = aliases.to_host(self);
  bool is_integral = at::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  return aliases.to_device(at::histc(is_integral ? host.to(at::kDouble) : host, bins, low, high).to(self.scalar_type()));
}

// -- convolutions: torch chooses the backend by device before any fallback --------------------------------------------
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  record("op", "aten::convolution");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(x.device().index());
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = aliases.to_host(*bias);
  return aliases.to_device(at::convolution(
      aliases.to_host(x), aliases.to_host(w), host_bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  record("op", "aten::convolution_backward");
  c10::impl::ExcludeDispatchKeyGuard guard(kAboveKernels);
  Aliases aliases(x.device().index());
  std::vector<int64_t> bias_sizes{transposed ? w.size(1) * groups : w.size(0)};
  auto [dx, dw, db] = at::convolution_backward(
      aliases.to_host(grad), aliases.to_host(x), aliases.to_host(w), at::OptionalIntArrayRef(bias_sizes), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {aliases.to_device(dx), aliases.to_device(dw), aliases.to_device(db)};
}

}  // namespace

at::Tensor host_alias(const at::Tensor& device, bool keeps_alive) {
  return tensor_over(host_storage(device.storage(), keeps_alive), c10::DispatchKey::CPU, device);
}

at::Tensor Aliases::to_host(const at::Tensor& t) {
  finish_copies_to(t.storage().unsafeGetStorageImpl());
  auto known = std::find_if(storages_.begin(), storages_.end(), [&](auto& pair) { return pair.first.is_alias_of(t.storage()); });
  if (known == storages_.end()) known = storages_.insert(known, {t.storage(), host_storage(t.storage(), false)});
  return tensors_.emplace_back(t, tensor_over(known->second, c10::DispatchKey::CPU, t)).second;
}

at::Tensor Aliases::to_device(const at::Tensor& host) {
  if (!host.defined() || !host.is_cpu()) return host;
  for (auto& [on_device, alias] : tensors_)
    if (alias.is_same(host)) return on_device;
  for (auto& [on_device, alias] : storages_)
    if (alias.is_alias_of(host.storage())) return tensor_over(on_device, kKey, host);
  c10::DataPtr data = adopt(host.storage(), device_);
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(), std::move(data), device_allocator(), true);
  storages_.emplace_back(storage, host.storage());
  return tensor_over(storage, kKey, host);
}

void Aliases::write_back() {
  for (auto& [on_device, alias] : storages_) {
    if (alias.data() == on_device.data()) continue;
    auto* storage = on_device.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(adopt(alias, on_device.device().index()));
    storage->set_nbytes(alias.nbytes());
  }
  for (auto& [on_device, alias] : tensors_)
    if (alias.sizes() != on_device.sizes() || alias.strides() != on_device.strides())
      on_device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &sim::set_storage);
  m.impl("set_.source_Storage_storage_offset", &sim::set_storage_at);
  m.impl("copy_", &sim::copy_);
  m.impl("record_stream", &sim::record_stream);
  m.impl("_efficientzerotensor", &sim::efficient_zero_tensor);
  m.impl("histc", &sim::histc);
  m.impl("_has_compatible_shallow_copy_type", &sim::has_compatible_shallow_copy_type);
  m.impl("convolution_overrideable", &sim::convolution);
  m.impl("convolution_backward_overrideable", &sim::convolution_backward);
  // One operator, as on CUDA, where other devices by default get many.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    bool is_foreach = op.name.rfind("aten::_foreach_", 0) == 0 && op.name != "aten::_foreach_copy_";
    if (is_foreach || op.name == "aten::native_layer_norm" || op.name == "aten::native_group_norm")
      m.impl(c10::toString(op).c_str(), torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  }
}

// torch.autocast: the operators that it runs in lower precision on every accelerator.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
