// Current device, streams, events and generators as torch asks for them, and copies that finish late.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_set>

namespace sim {
namespace {

// -- streams and events: work runs at once, so streams are only names, and events are moments ------------------------
thread_local int64_t t_stream[kMaxDevices] = {};
std::atomic<int64_t> g_next_stream{1};
using Moment = std::chrono::steady_clock::time_point;

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, c10::DeviceIndex(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index() && device.index() != current_device()) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < num_devices()) setDevice(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(num_devices()); }

  c10::Device indexed(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), t_stream[indexed(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), g_next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    wait_for(stream.device_index());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    sim::record("wait", "stream.synchronize");
    wait_for(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    sim::record("wait", "device.synchronize");
    wait_for(device);
  }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    wait_for(-1);
    return true;
  }
  void synchronizeEvent(void*) const override {
    sim::record("wait", "event.synchronize");
    wait_for(-1);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Moment*>(second) - *static_cast<Moment*>(first)).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
};

// -- generators: each holds one of the CPU, which CPU kernels use -----------------------------------------------------
struct Generator final : c10::GeneratorImpl {
  Generator(int device, at::Generator on_host)
      : GeneratorImpl(c10::Device(kDevice, c10::DeviceIndex(device)), c10::DispatchKeySet(kKey)), host(std::move(on_host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of simulated devices have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "generators of simulated devices have no offset"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }

  at::Generator host;
};

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, c10::DeviceIndex(current_device())}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

// -- late copies ------------------------------------------------------------------------------------------------------
struct LateCopy {
  int device;
  const c10::StorageImpl* destination;
  const c10::StorageImpl* source;  // on the host; nullptr for copies to the host, which begin with a copy of theirs
  std::function<void()> run;
};
std::mutex g_mutex;
std::vector<LateCopy> g_copies;
std::atomic<bool> g_has_copies{false};

template <class Predicate>
void finish(Predicate is_due) {
  if (!g_has_copies) return;
  std::vector<LateCopy> due;
  {
    std::lock_guard<std::mutex> guard(g_mutex);
    auto rest = std::stable_partition(g_copies.begin(), g_copies.end(), [&](auto& copy) { return !is_due(copy); });
    due.assign(rest, g_copies.end());
    g_copies.erase(rest, g_copies.end());
    g_has_copies = !g_copies.empty();
  }
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  for (auto& copy : due) copy.run();
}

void add(LateCopy copy) {
  std::lock_guard<std::mutex> guard(g_mutex);
  g_copies.push_back(std::move(copy));
  g_has_copies = true;
}

}  // namespace

void copy_to_device_later(const at::Tensor& device, const at::Tensor& host) {
  // A late copy keeps its source alive, as CUDA's allocator of pinned memory does, but not its destination.
  auto run = [storage = device.storage().getWeakStorageImpl(), to = host_alias(device, false), from = host.detach()] {
    if (auto alive = storage.lock()) to.copy_(from);
  };
  auto source = host.storage().unsafeGetStorageImpl();
  add({device.device().index(), device.storage().unsafeGetStorageImpl(), source, std::move(run)});
}

void copy_to_host_later(const at::Tensor& host, const at::Tensor& device) {
  auto run = [to = host.detach(), from = host_alias(device).clone()] { to.copy_(from); };
  std::memset(host.mutable_data_ptr(), kGarbage, host.nbytes());
  add({device.device().index(), host.storage().unsafeGetStorageImpl(), nullptr, std::move(run)});
}

void wait_for(int device) {
  finish([device](const LateCopy& copy) { return device < 0 || copy.device == device; });
}

void finish_copies_to(const c10::StorageImpl* storage) {
  if (!g_has_copies) return;
  // Copies of a stream are in order: one from the host reads what an earlier one to the host wrote.
  std::unordered_set<const c10::StorageImpl*> due{storage};
  {
    std::lock_guard<std::mutex> guard(g_mutex);
    for (auto& copy : g_copies)
      if (copy.destination == storage && copy.source) due.insert(copy.source);
  }
  finish([&due](const LateCopy& copy) { return due.count(copy.destination) > 0; });
}

at::Generator generator_on_host(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kDevice, "Expected a '", c10::DeviceTypeName(kDevice, true),
      "' device type for generator but found '", generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < num_devices(); ++index) made.push_back(new_generator(index));
    return made;
  }();
  return generators.at(device < 0 ? current_device() : device);
}

namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)
[[maybe_unused]] const bool g_registered = [] {
  c10::SetAllocator(kDevice, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace

}  // namespace sim
