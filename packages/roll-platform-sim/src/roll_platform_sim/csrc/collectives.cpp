// The collective backend, gloo on the devices' memory with NCCL's rules; and the Python module.
#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <atomic>

namespace py = pybind11;

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;

// A collective that has finished. Its future holds the outputs.
struct Finished final : c10d::Work {
  explicit Finished(Tensors outputs)
      : outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{c10::Device(kDevice, c10::DeviceIndex(current_device()))})) {
    future_->markCompleted(at::IValue(outputs_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct Collectives final : c10d::Backend {
  Collectives(
      int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, std::string name)
      : Backend(rank, size), gloo_(std::move(gloo)), store_(std::move(store)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  Work broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run("broadcast", t, [&](Tensors host) { return gloo_->broadcast(host, o); });
  }
  Work allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run("allreduce", t, [&](Tensors host) { return gloo_->allreduce(host, o); });
  }
  Work allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& tensor : t) {
      Tensors one{tensor};
      allreduce(one, o);
    }
    return c10::make_intrusive<Finished>(t);
  }
  Work reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run("reduce", t, [&](Tensors host) { return gloo_->reduce(host, o); });
  }
  Work allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run("allgather", out, in, [&](Lists to, Tensors from) { return gloo_->allgather(to, from, o); });
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return run("allgather", out, in, [&](at::Tensor to, at::Tensor from) { return gloo_->_allgather_base(to, from, o); });
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < out.size(); ++i) _allgather_base(out[i], in[i], o);
    return c10::make_intrusive<Finished>(out);
  }
  Work gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return run("gather", out, in, [&](Lists to, Tensors from) { return gloo_->gather(to, from, o); });
  }
  Work scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return run("scatter", out, in, [&](Tensors to, Lists from) { return gloo_->scatter(to, from, o); });
  }
  Work reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter", out, in, [&](Tensors to, Lists from) { return gloo_->reduce_scatter(to, from, o); });
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run("reduce_scatter", out, in, [&](at::Tensor to, at::Tensor from) {
      return gloo_->_reduce_scatter_base(to, from, o);
    });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < out.size(); ++i) _reduce_scatter_base(out[i], in[i], o);
    return c10::make_intrusive<Finished>(out);
  }
  Work alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& o) override {
    return run("alltoall", out, in, [&](at::Tensor to, at::Tensor from) {
      return gloo_->alltoall_base(to, from, out_sizes, in_sizes, o);
    });
  }
  Work alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    // gloo has only the form with one tensor.
    auto sizes = [](const Tensors& all) {
      std::vector<int64_t> found;
      for (auto& t : all) found.push_back(t.numel());
      return found;
    };
    auto out_sizes = sizes(out), in_sizes = sizes(in);
    return run("alltoall", out, in, [&](Tensors to, Tensors from) {
      Tensors flat;
      for (auto& t : from) flat.push_back(t.reshape(-1));
      at::Tensor sent = at::cat(flat), received = at::empty({c10::sum_integers(out_sizes)}, sent.options());
      auto work = gloo_->alltoall_base(received, sent, out_sizes, in_sizes, o);
      work->wait();
      auto parts = received.split_with_sizes(sizes(to));
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(parts[i].view(to[i].sizes()));
      return work;
    });
  }
  // Neither side of a point-to-point copy waits for the other before `wait`.
  Work send(Tensors& t, int to, int tag) override {
    auto host = hosts(t);
    return gloo_->send(host, to, tag);
  }
  Work recv(Tensors& t, int from, int tag) override {
    auto host = hosts(t);
    return gloo_->recv(host, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& o) override {
    check_ranks();
    gloo_->barrier(o)->wait();
    return c10::make_intrusive<Finished>(Tensors{});
  }

 private:
  // As in NCCL, ranks of a group need devices of their own, which shows at the first collective.
  void check_ranks() {
    if (!store_) return;
    auto store = std::move(store_);
    auto bytes = [](const std::string& text) { return std::vector<uint8_t>(text.begin(), text.end()); };
    char host[256] = {};
    ::gethostname(host, sizeof(host) - 1);
    auto own = bytes(std::string(host) + ":" + std::to_string(number_on_host(current_device())));
    store->set(std::to_string(rank_), own);
    for (int other = 0; other < size_; ++other)
      TORCH_CHECK(
          other == rank_ || store->get(std::to_string(other)) != own, "Duplicate device detected: rank ", rank_, " and rank ",
          other, " both on device ", number_on_host(current_device()), " of ", host);
  }

  at::Tensor hosts(const at::Tensor& t) {
    TORCH_CHECK(on_device(t), name_, " has no collectives of tensors on ", t.device());
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    check_ranks();
    finish_copies_to(t.storage().unsafeGetStorageImpl());
    at::Tensor host = host_alias(t);
    bool as_bytes = t.itemsize() == 1 && t.scalar_type() != at::kChar;  // bool and float8, which gloo does not know
    return as_bytes ? host.view(at::kByte) : host;
  }
  template <class T>
  std::vector<T> hosts(const std::vector<T>& all) {
    std::vector<T> made;
    for (auto& each : all) made.push_back(hosts(each));
    return made;
  }
  static void append(Tensors& all, const at::Tensor& t) { all.push_back(t); }
  template <class T>
  static void append(Tensors& all, const std::vector<T>& more) {
    for (auto& each : more) append(all, each);
  }

  // Runs a collective of gloo on the host's aliases of its tensors, and waits for it.
  template <class A, class Run>
  Work run(const char* what, A& a, Run call) {
    record("op", std::string("collective::") + what);
    call(hosts(a))->wait();
    return finished(a);
  }
  template <class A, class B, class Run>
  Work run(const char* what, A& a, B& b, Run call) {
    record("op", std::string("collective::") + what);
    call(hosts(a), hosts(b))->wait();
    return finished(a);
  }
  template <class T>
  static Work finished(const T& outputs) {
    Tensors all;
    append(all, outputs);
    return c10::make_intrusive<Finished>(std::move(all));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;  // until the first collective
  std::string name_;
};

// -- traces -----------------------------------------------------------------------------------------------------------
std::atomic<bool> g_has_observer{false};
PyObject* g_observer = nullptr;  // guarded by the GIL

}  // namespace

void record(const char* kind, std::string_view what, int64_t num_bytes) {
  if (!g_has_observer || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (g_observer) py::reinterpret_borrow<py::object>(g_observer)(kind, std::string(what), num_bytes);
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("configure", &sim::configure);
  m.def("num_devices", &sim::num_devices);
  m.def("number_on_host", &sim::number_on_host);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("is_initialized", &sim::is_initialized);
  m.def("in_bad_fork", &sim::in_bad_fork);
  m.def("memory_info", &sim::memory_info);
  m.def("default_generator", &sim::default_generator);
  m.def("set_observer", [](const py::object& observer) {
    Py_XDECREF(sim::g_observer);
    sim::g_observer = observer.is_none() ? nullptr : observer.inc_ref().ptr();
    sim::g_has_observer = sim::g_observer != nullptr;
  });
  py::module_::import("torch._C._distributed_c10d");
  py::class_<sim::Collectives, c10d::Backend, c10::intrusive_ptr<sim::Collectives>>(m, "Collectives")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>, std::string>());
}
