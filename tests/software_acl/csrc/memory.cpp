// Device memory: two reservations of equal size. Programs see addresses in the first, which is never mapped, so a host
// dereference faults as it would on hardware; kernels see the same offset in the second. Freed memory faults for both.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace software_acl {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

struct Block {
  size_t bytes;
  int device;
  bool counted;  // a reserved range holds no memory of its own
};

struct Memory {
  std::mutex lock;
  size_t span = size_t{8} << 40;
  char* device = nullptr;
  char* host = nullptr;
  size_t top = kPage;
  size_t limit;
  std::map<size_t, size_t> free_ranges;
  std::map<size_t, Block> blocks;
  std::map<size_t, size_t> mapped;  // expandable segments: offset -> bytes
  std::map<int, size_t> used;
  std::map<const char*, size_t> pinned;

  Memory() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    device = static_cast<char*>(mmap(nullptr, span, PROT_NONE, flags, -1, 0));
    host = static_cast<char*>(mmap(nullptr, span, PROT_NONE, flags, -1, 0));
    if (device == MAP_FAILED || host == MAP_FAILED) std::abort();
    limit = std::stoul(setting("SOFTWARE_ACL_MEMORY_MB", "16384")) << 20;
  }

  size_t take(size_t bytes) {
    for (auto it = free_ranges.begin(); it != free_ranges.end(); ++it) {
      if (it->second < bytes) continue;
      const size_t at = it->first, rest = it->second - bytes;
      free_ranges.erase(it);
      if (rest > 0) free_ranges[at + bytes] = rest;
      return at;
    }
    const size_t at = top;
    if (at + bytes > span) return 0;
    top += bytes;
    return at;
  }

  void give_back(size_t at, size_t bytes) {
    auto next = free_ranges.lower_bound(at);
    if (next != free_ranges.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_ranges.erase(next);
    }
    if (next != free_ranges.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_ranges[at] = bytes;
  }

  void open(size_t at, size_t bytes) { mprotect(host + at, bytes, PROT_READ | PROT_WRITE); }

  void close(size_t at, size_t bytes) {
    madvise(host + at, bytes, MADV_DONTNEED);
    mprotect(host + at, bytes, PROT_NONE);
  }
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

int allocate(void** out, size_t bytes, bool counted, int device) {
  auto& m = memory();
  bytes = round_up(bytes == 0 ? 1 : bytes, kPage);
  std::lock_guard<std::mutex> guard(m.lock);
  if (counted && m.used[device] + bytes > m.limit) return kNoMemory;
  const size_t at = m.take(bytes);
  if (at == 0) return kNoMemory;
  m.blocks[at] = {bytes, device, counted};
  if (counted) {
    m.used[device] += bytes;
    m.open(at, bytes);
  }
  *out = m.device + at;
  return kOk;
}

int release(const void* address) {
  auto& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  const size_t at = static_cast<const char*>(address) - m.device;
  auto it = m.blocks.find(at);
  if (it == m.blocks.end()) return fail(kInvalidParameter, "this address was not allocated");
  if (it->second.counted) m.used[it->second.device] -= it->second.bytes;
  m.close(at, it->second.bytes);
  m.give_back(at, it->second.bytes);
  m.blocks.erase(it);
  return kOk;
}

const char* direction(const void* to, const void* from) {
  return on_device(to) ? (on_device(from) ? "device to device" : "host to device")
                       : (on_device(from) ? "device to host" : "host to host");
}

struct Physical {
  size_t bytes;
  int device;
};

}  // namespace

bool on_device(const void* address) {
  const auto& m = memory();
  return address >= m.device && address < m.device + m.span;
}

void* host_view(const void* address) {
  auto* bytes = const_cast<char*>(static_cast<const char*>(address));
  return on_device(address) ? memory().host + (bytes - memory().device) : bytes;
}

int64_t device_address(const void* view) {
  const auto& m = memory();
  const auto* bytes = static_cast<const char*>(view);
  const bool inside = bytes >= m.host && bytes < m.host + m.span;
  return reinterpret_cast<int64_t>(inside ? m.device + (bytes - m.host) : bytes);
}

bool is_pinned(const void* address) {
  auto& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  auto it = m.pinned.upper_bound(static_cast<const char*>(address));
  if (it == m.pinned.begin()) return false;
  --it;
  return static_cast<const char*>(address) < it->first + it->second;
}

int64_t device_bytes(int device) {
  auto& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  return static_cast<int64_t>(m.used[device]);
}

}  // namespace software_acl

using namespace software_acl;

EXPORT int64_t software_acl_device_bytes(int device) { return device_bytes(device); }

EXPORT int aclrtMalloc(void** out, size_t bytes, int) {
  const int code = allocate(out, bytes, true, current_device());
  return code == kOk ? code : fail(code, "out of device memory");
}
EXPORT int aclrtMallocAlign32(void** out, size_t bytes, int policy) { return aclrtMalloc(out, bytes, policy); }
EXPORT int aclrtFree(void* address) { return release(address); }

EXPORT int aclrtGetMemInfo(int, size_t* available, size_t* total) {
  *total = memory().limit;
  *available = memory().limit - static_cast<size_t>(device_bytes(current_device()));
  return kOk;
}

EXPORT int aclrtMallocHost(void** out, size_t bytes) {
  bytes = round_up(bytes == 0 ? 1 : bytes, kPage);
  *out = std::aligned_alloc(kPage, bytes);
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().pinned[static_cast<char*>(*out)] = bytes;
  return kOk;
}

EXPORT int aclrtFreeHost(void* address) {
  {
    std::lock_guard<std::mutex> guard(memory().lock);
    memory().pinned.erase(static_cast<char*>(address));
  }
  std::free(address);
  return kOk;
}

EXPORT int aclrtHostRegister(void* address, uint64_t bytes, int, void** out) {
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().pinned[static_cast<char*>(address)] = bytes;
  if (out != nullptr) *out = address;
  return kOk;
}

EXPORT int aclrtHostUnregister(void* address) {
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().pinned.erase(static_cast<char*>(address));
  return kOk;
}

EXPORT int aclrtReserveMemAddress(void** out, size_t bytes, size_t, void*, uint64_t) {
  return allocate(out, bytes, false, current_device());
}
EXPORT int aclrtReleaseMemAddress(void* address) { return release(address); }

EXPORT int aclrtMallocPhysical(void** handle, size_t bytes, const void*, uint64_t) {
  auto& m = memory();
  const int device = current_device();
  std::lock_guard<std::mutex> guard(m.lock);
  if (m.used[device] + bytes > m.limit) return kNoMemory;
  m.used[device] += bytes;
  *handle = new Physical{bytes, device};
  return kOk;
}

EXPORT int aclrtFreePhysical(void* handle) {
  auto* physical = static_cast<Physical*>(handle);
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().used[physical->device] -= physical->bytes;
  delete physical;
  return kOk;
}

EXPORT int aclrtMapMem(void* address, size_t bytes, size_t, void*, uint64_t) {
  auto& m = memory();
  const size_t at = static_cast<char*>(address) - m.device;
  std::lock_guard<std::mutex> guard(m.lock);
  m.open(at, bytes);
  m.mapped[at] = bytes;
  return kOk;
}

EXPORT int aclrtUnmapMem(void* address) {
  auto& m = memory();
  const size_t at = static_cast<char*>(address) - m.device;
  std::lock_guard<std::mutex> guard(m.lock);
  m.close(at, m.mapped[at]);
  m.mapped.erase(at);
  return kOk;
}

EXPORT int aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int) {
  if (const int code = refuse_synchronous("aclrtMemcpy")) return code;
  if (bytes > room) return fail(kInvalidParameter, "a copy larger than its destination");
  Line("memcpy").text("kind", direction(to, from)).number("bytes", bytes).number("synchronous", 1);
  std::memcpy(host_view(to), host_view(from), bytes);
  return kOk;
}

EXPORT int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int, void* stream) {
  if (bytes > room) return fail(kInvalidParameter, "a copy larger than its destination");
  Stream* target = resolve(stream);
  Line("memcpy").text("kind", direction(to, from)).number("bytes", bytes).number("stream", target->id);
  const bool pageable = (!on_device(to) && !is_pinned(to)) || (!on_device(from) && !is_pinned(from));
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (target->capture && pageable) {
      target->capture->invalid = true;
      return fail(kPageable, "an asynchronous copy of pageable host memory cannot be captured");
    }
  }
  Task task{"memcpy", nullptr, false};
  if (!on_device(from) && pageable) {  // the caller may free its buffer as soon as this call returns
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                    static_cast<const char*>(from) + bytes);
    task.run = [=] { std::memcpy(host_view(to), copy->data(), copy->size()); };
  } else {
    task.run = [=] { std::memmove(host_view(to), host_view(from), bytes); };
  }
  return submit(target, std::move(task));
}

EXPORT int aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (const int code = refuse_synchronous("aclrtMemset")) return code;
  if (bytes > room) return kInvalidParameter;
  std::memset(host_view(to), value, bytes);
  return kOk;
}

EXPORT int aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, void* stream) {
  if (bytes > room) return kInvalidParameter;
  return submit(resolve(stream), {"memset", [=] { std::memset(host_view(to), value, bytes); }, false});
}
