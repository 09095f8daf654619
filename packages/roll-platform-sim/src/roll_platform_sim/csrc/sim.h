// A simulated accelerator: a PrivateUse1 backend of torch in the host's memory.
//
//   memory.cpp       allocators; bytes per device, of this process and of all processes of the host
//   device.cpp       current device, streams, events, generators; copies that finish late
//   operators.cpp    the fallback, which runs CPU kernels on the devices' memory; copies; what CUDA refuses
//   attention.cpp    fused attention; varlen_attention.cpp: of sequences laid end to end
//   collectives.cpp  the collective backend, and the Python module
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <string>
#include <utility>
#include <vector>

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr int kGarbage = 0xCB;  // every byte of memory that nothing has been written to

// -- devices ----------------------------------------------------------------------------------------------------------
// `visible` has the host's numbers of this process's devices, `table` is a file that all processes of the host share.
void configure(std::vector<int> visible, int64_t total_bytes, const std::string& table);
int num_devices();
int number_on_host(int index);
int current_device();
void set_device(int index);
bool is_initialized();
bool in_bad_fork();
void check_usable();  // throws if no device is visible, and in children that were forked after the first use

// -- memory -----------------------------------------------------------------------------------------------------------
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// Count the memory of a host storage as memory of a device, without a copy.
c10::DataPtr adopt(c10::Storage host, int device);
void resize(c10::StorageImpl* storage, size_t num_bytes);
std::pair<size_t, size_t> memory_info(int device);  // free and total; `free` is what no process has reserved

// -- events that a trace counts ---------------------------------------------------------------------------------------
// kind: "op", "h2d", "d2h", "d2d", or "wait" where the host waits for a device.
void record(const char* kind, std::string_view what, int64_t num_bytes = 0);

// -- copies that finish late ------------------------------------------------------------------------------------------
// A non-blocking copy of pinned memory runs when an operator uses its destination, or when the host waits.
void copy_to_device_later(const at::Tensor& device, const at::Tensor& host);
void copy_to_host_later(const at::Tensor& host, const at::Tensor& device);
void wait_for(int device);                                // the host waits for a device; -1 for all
void finish_copies_to(const c10::StorageImpl* storage);  // before an operator uses this storage

// -- operators --------------------------------------------------------------------------------------------------------
inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }
at::Generator generator_on_host(const at::Generator& generator);
const at::Generator& default_generator(int device);
// A tensor of the host with the same memory, which it keeps alive or not.
at::Tensor host_alias(const at::Tensor& device, bool keeps_alive = true);

// Host tensors with the memory of one operator call's device tensors, and the way back for its results.
class Aliases {
 public:
  explicit Aliases(int device) : device_(device) {}
  at::Tensor to_host(const at::Tensor& t);
  at::Tensor to_device(const at::Tensor& host);
  // Gives device tensors the memory and the shape of aliases that a kernel has resized.
  void write_back();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // device, host
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // device, host
  int device_;
};

}  // namespace sim
