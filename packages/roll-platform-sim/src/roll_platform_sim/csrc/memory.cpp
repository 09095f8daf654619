// Memory: the host's, counted per device in this process and over all processes of the host.
#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {
namespace {

constexpr int kMaxProcesses = 256;

// One row of the table that all processes of the host map.
struct Process {
  std::atomic<int> pid;
  std::atomic<int64_t> reserved[kMaxDevices];  // by the host's number of a device

  bool is_alive() const {
    int owner = pid.load();
    return owner && (::kill(owner, 0) == 0 || errno != ESRCH);
  }
};

std::mutex g_mutex;  // of all that follows but the table
std::vector<int> g_visible;
int64_t g_total_bytes = 0;
std::string g_table;
Process* g_processes = nullptr;
Process* g_self = nullptr;
c10::CachingDeviceAllocator::DeviceStats g_stats[kMaxDevices];
std::map<uintptr_t, size_t> g_pinned;
std::atomic<bool> g_initialized{false}, g_bad_fork{false};
thread_local int t_device = 0;

int64_t rounded(size_t num_bytes) { return int64_t((num_bytes + 511) / 512 * 512); }

void join_table() {
  if (g_self) return;
  int file = ::open(g_table.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  TORCH_CHECK(file >= 0 && ::ftruncate(file, sizeof(Process) * kMaxProcesses) == 0, "cannot open ", g_table);
  void* memory = ::mmap(nullptr, sizeof(Process) * kMaxProcesses, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  TORCH_CHECK(memory != MAP_FAILED, "cannot map ", g_table);
  g_processes = static_cast<Process*>(memory);
  for (Process* row = g_processes; row < g_processes + kMaxProcesses; ++row) {
    int owner = row->pid.load();
    if (row->is_alive() || !row->pid.compare_exchange_strong(owner, ::getpid())) continue;
    for (auto& reserved : row->reserved) reserved = 0;
    g_self = row;
    std::atexit([] {
      if (g_self) g_self->pid = 0;
    });
    return;
  }
  TORCH_CHECK(false, "more than ", kMaxProcesses, " processes use simulated devices");
}

int64_t reserved_by_all(int device) {
  int64_t sum = 0;
  for (Process* row = g_processes; row < g_processes + kMaxProcesses; ++row)
    if (row->is_alive()) sum += row->reserved[g_visible.at(device)];
  return sum;
}

// Reserved memory is the most that was allocated since the cache was emptied: a caching allocator that never fragments.
void allocate_bytes(int device, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(g_mutex);
  join_table();
  auto& stats = g_stats[device];
  auto& allocated = stats.allocated_bytes[0];
  auto& reserved = stats.reserved_bytes[0];
  int64_t more = allocated.current + num_bytes - reserved.current;
  if (more > 0) {
    auto& shared = g_self->reserved[g_visible.at(device)];
    shared += more;  // before the check, so that two processes never both get the last bytes
    int64_t used = reserved_by_all(device);
    if (used > g_total_bytes) {
      shared -= more;
      ++stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated device ", device, " is out of memory: tried to allocate ", num_bytes,
          " bytes; of ", g_total_bytes, " bytes, ", used - more, " are reserved by all processes; this process has ",
          allocated.current, " allocated and ", reserved.current, " reserved");
    }
    reserved.increase(more);
  }
  for (auto* stat : {&stats.allocated_bytes, &stats.requested_bytes, &stats.active_bytes}) (*stat)[0].increase(num_bytes);
  stats.allocation[0].increase(1);
}

void free_bytes(int device, int64_t num_bytes) {
  std::lock_guard<std::mutex> guard(g_mutex);
  auto& stats = g_stats[device];
  for (auto* stat : {&stats.allocated_bytes, &stats.requested_bytes, &stats.active_bytes}) (*stat)[0].decrease(num_bytes);
  stats.allocation[0].decrease(1);
}

void* host_memory(size_t num_bytes) {
  void* data = nullptr;
  TORCH_CHECK(::posix_memalign(&data, 512, num_bytes) == 0, "the host is out of memory");
  return data;
}

struct Block {
  void* data;
  int64_t num_bytes;
  int device;
  c10::Storage owner;  // of memory that a CPU kernel allocated

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    free_bytes(block->device, block->num_bytes);
    if (!block->owner) std::free(block->data);
    delete block;
  }
};

void release_nothing(void*) {}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    check_usable();
    c10::Device device(kDevice, c10::DeviceIndex(current_device()));
    if (!num_bytes) return {nullptr, nullptr, &release_nothing, device};
    int64_t size = rounded(num_bytes);
    allocate_bytes(device.index(), size);
    void* data = std::memset(host_memory(size), kGarbage, size);
    return {data, new Block{data, size, device.index(), {}}, &Block::release, device};
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool initialized() override { return is_initialized(); }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> guard(g_mutex);
    for (size_t device = 0; g_self && device < g_visible.size(); ++device) {
      auto& reserved = g_stats[device].reserved_bytes[0];
      int64_t unused = reserved.current - g_stats[device].allocated_bytes[0].current;
      reserved.decrease(unused);
      g_self->reserved[g_visible[device]] -= unused;
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(g_mutex);
    return g_stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return memory_info(device); }

  template <class Change>
  void each_stat(c10::DeviceIndex device, Change change) {
    std::lock_guard<std::mutex> guard(g_mutex);
    auto& stats = g_stats[device];
    for (auto* stat :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.active_bytes, &stats.allocation})
      change((*stat)[0]);
  }
};

// Freed memory is returned at once, so that there is no cache to empty.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = host_memory(std::max<size_t>(num_bytes, 1));
    std::lock_guard<std::mutex> guard(g_mutex);
    g_pinned[reinterpret_cast<uintptr_t>(data)] = std::max<size_t>(num_bytes, 1);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> guard(g_mutex);
      g_pinned.erase(reinterpret_cast<uintptr_t>(data));
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

void configure(std::vector<int> visible, int64_t total_bytes, const std::string& table) {
  g_visible = std::move(visible);
  g_total_bytes = total_bytes;
  g_table = table;
  at::setHostAllocator(kDevice, static_cast<at::HostAllocator*>(pinned_allocator()));
  ::pthread_atfork(nullptr, nullptr, [] {
    g_bad_fork = g_initialized.load();
    g_self = nullptr;  // it is the parent's row
  });
}

int num_devices() { return int(g_visible.size()); }
int number_on_host(int index) { return g_visible.at(index); }
int current_device() { return t_device; }
bool is_initialized() { return g_initialized && !g_bad_fork; }
bool in_bad_fork() { return g_bad_fork; }

void set_device(int index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "invalid device ordinal ", index, ": ", num_devices(), " are visible");
  t_device = index;
  g_initialized = true;
}

void check_usable() {
  TORCH_CHECK(
      !g_bad_fork, "Cannot re-initialize simulated devices in forked subprocess. To use them with multiprocessing, you"
      " must use the 'spawn' start method");
  TORCH_CHECK(num_devices() > 0, "no simulated device is visible");
  g_initialized = true;
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(g_mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto after = g_pinned.upper_bound(address);
  return after != g_pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

c10::DataPtr adopt(c10::Storage host, int device) {
  c10::Device on(kDevice, c10::DeviceIndex(device));
  int64_t size = rounded(host.nbytes());
  if (!size) return {nullptr, nullptr, &release_nothing, on};
  allocate_bytes(device, size);
  void* data = host.mutable_data();
  return {data, new Block{data, size, device, std::move(host)}, &Block::release, on};
}

void resize(c10::StorageImpl* storage, size_t num_bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  int before = current_device();
  set_device(storage->device().index());
  c10::DataPtr data = device_allocator()->allocate(num_bytes);
  set_device(before);
  if (size_t kept = std::min(num_bytes, storage->nbytes())) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(num_bytes);
}

std::pair<size_t, size_t> memory_info(int device) {
  std::lock_guard<std::mutex> guard(g_mutex);
  join_table();
  return {size_t(std::max<int64_t>(0, g_total_bytes - reserved_by_all(device))), size_t(g_total_bytes)};
}

}  // namespace sim
