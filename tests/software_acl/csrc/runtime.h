// The runtime's own view of a device: streams are worker threads, device memory is host memory behind addresses that
// fault when the host reads them, a captured graph is a list of tasks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base.h"

namespace software_acl {

void flush_trace();

// ---- memory -------------------------------------------------------------------------------------------------------
bool on_device(const void* address);
bool is_pinned(const void* address);
int64_t device_bytes(int device);

// ---- streams ------------------------------------------------------------------------------------------------------
struct Graph;

using TaskRef = std::shared_ptr<const Task>;

struct Slot {
  TaskRef task;
  int stream;
};

struct Group {
  Graph* graph;
  std::vector<std::shared_ptr<Slot>> slots;
};

struct Stream {
  int id = 0;
  int device = 0;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<TaskRef> queue;
  bool busy = false;
  bool closed = false;
  int error = kOk;
  std::string message;
  // Guarded by capture_lock():
  std::shared_ptr<Graph> capture;
  std::map<Stream*, size_t> seen;  // tasks of each captured stream that precede this stream's next task
  std::shared_ptr<Group> open_group;
  Group* updating = nullptr;
  std::vector<TaskRef> update;
};

enum CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

struct Graph {
  uint32_t id = 0;
  int mode = kGlobal;
  Stream* origin = nullptr;
  std::thread::id owner;
  bool invalid = false;
  std::vector<std::shared_ptr<Slot>> slots;
  std::vector<std::shared_ptr<Group>> groups;
  std::map<Stream*, size_t> lengths;  // captured tasks of each stream
  std::mutex execution;
};

struct Event {
  struct State {
    std::mutex lock;
    std::condition_variable changed;
    bool done = false;
    std::chrono::steady_clock::time_point when;
  };
  uint32_t flag = 0;
  std::shared_ptr<State> state;
  std::shared_ptr<Graph> capture;  // recorded inside this capture
  std::map<Stream*, size_t> seen;
};

std::mutex& capture_lock();
std::map<uint32_t, std::shared_ptr<Graph>>& open_captures();
int refuse_synchronous(const char* call);                // 107030 while a capture forbids it
int synchronize(Stream* stream, int timeout_ms);
int synchronize_all(int timeout_ms);
int count_streams();
int count_graphs();
int current_device();

}  // namespace software_acl
