// Streams are worker threads that run their tasks in order. Inline execution would be simpler but could not hold back a
// replay until another stream has updated its parameters.
#include <algorithm>

#include "runtime.h"

namespace software_acl {
namespace {

struct Streams {
  std::mutex lock;
  std::set<Stream*> alive;
  std::map<int, Stream*> defaults;
  int next = 0;
};

Streams& streams() {
  static auto* instance = new Streams;
  return *instance;
}

void execute(Stream* stream, const Task& task) {
  if (stream->error != kOk && !task.always) return;
  try {
    if (task.run) task.run();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> guard(stream->lock);
    if (stream->error == kOk) {
      stream->error = kKernelFailed;
      stream->message = task.name + ": " + error.what();
      Line("kernel_failed").text("op", task.name).text("message", error.what());
    }
  }
}

void work(Stream* stream) {
  std::unique_lock<std::mutex> guard(stream->lock);
  for (;;) {
    stream->changed.wait(guard, [&] { return !stream->queue.empty() || stream->closed; });
    if (stream->queue.empty()) return;  // closed and drained; the object itself is kept, others may point at it
    TaskRef task = stream->queue.front();
    stream->queue.pop_front();
    stream->busy = true;
    guard.unlock();
    execute(stream, *task);
    task.reset();
    guard.lock();
    stream->busy = false;
    if (stream->queue.empty()) stream->changed.notify_all();
  }
}

Stream* start(int device) {
  auto& all = streams();
  auto* stream = new Stream;
  std::lock_guard<std::mutex> guard(all.lock);
  stream->id = all.next++;
  stream->device = device;
  all.alive.insert(stream);
  std::thread(work, stream).detach();
  return stream;
}

void enqueue(Stream* stream, TaskRef task) {
  std::lock_guard<std::mutex> guard(stream->lock);
  stream->queue.push_back(std::move(task));
  stream->changed.notify_all();
}

bool is_default(Stream* stream) {
  std::lock_guard<std::mutex> guard(streams().lock);
  auto it = streams().defaults.find(stream->device);
  return it != streams().defaults.end() && it->second == stream;
}

int capture_task(Stream* stream, TaskRef task) {
  Graph& graph = *stream->capture;
  if (graph.invalid) return fail(kInvalidated, "an earlier error has spoiled this capture");
  auto slot = std::make_shared<Slot>(Slot{std::move(task), stream->id});
  if (stream->open_group) {
    if (!slot->task->kernel) {
      graph.invalid = true;
      return fail(kNotAGraphTask, slot->task->name + " cannot be part of a task group");
    }
    stream->open_group->slots.push_back(slot);
  }
  graph.slots.push_back(slot);
  stream->seen[stream] = ++graph.lengths[stream];
  return kOk;
}

}  // namespace

std::mutex& capture_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

Stream* resolve(void* stream) {
  if (stream != nullptr) return static_cast<Stream*>(stream);
  const int device = std::max(current_device(), 0);
  auto& all = streams();
  {
    std::lock_guard<std::mutex> guard(all.lock);
    auto it = all.defaults.find(device);
    if (it != all.defaults.end()) return it->second;
  }
  Stream* created = start(device);
  std::lock_guard<std::mutex> guard(all.lock);
  return all.defaults.emplace(device, created).first->second;
}

int submit(Stream* stream, Task task) {
  auto shared = std::make_shared<const Task>(std::move(task));
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (stream->updating != nullptr && shared->kernel) {
      stream->update.push_back(shared);
      return kOk;
    }
    if (stream->capture) return capture_task(stream, shared);
    if (!open_captures().empty() && is_default(stream)) {
      for (auto& [id, graph] : open_captures()) {
        if (graph->mode == kRelaxed) continue;
        graph->invalid = true;
        return fail(kDefaultStream, "work on the default stream while a capture is open: " + shared->name);
      }
    }
  }
  if (shared->kernel) {
    Line("launch").text("op", shared->name).number("stream", stream->id);
  } else {
    Line("queued").text("task", shared->name).number("stream", stream->id);
  }
  enqueue(stream, shared);
  return kOk;
}

int synchronize(Stream* stream, int timeout_ms) {
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (stream->capture) {  // torch_npu's tests expect that the capture stays usable
      return fail(kStreamCaptured, "the host cannot wait for a stream that is being captured");
    }
  }
  std::unique_lock<std::mutex> guard(stream->lock);
  auto idle = [&] { return stream->queue.empty() && !stream->busy; };
  if (timeout_ms < 0) {
    stream->changed.wait(guard, idle);
  } else if (!stream->changed.wait_for(guard, std::chrono::milliseconds(timeout_ms), idle)) {
    return fail(kStreamTimeout, "the stream did not finish in time");
  }
  return stream->error == kOk ? kOk : fail(stream->error, stream->message);
}

int synchronize_all(int timeout_ms) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(streams().lock);
    for (Stream* stream : streams().alive) {
      if (stream->device == current_device()) all.push_back(stream);
    }
  }
  for (Stream* stream : all) {
    if (const int code = synchronize(stream, timeout_ms)) return code;
  }
  return kOk;
}

int count_streams() {
  std::lock_guard<std::mutex> guard(streams().lock);
  return static_cast<int>(streams().alive.size());
}

}  // namespace software_acl

using namespace software_acl;

EXPORT int aclrtCreateStreamWithConfig(void** out, uint32_t, uint32_t) {
  static const int limit = std::stoi(setting("SOFTWARE_ACL_STREAMS", "2048"));
  if (count_streams() + count_graphs() >= limit) return fail(kNoStream, "out of streams");
  *out = start(std::max(current_device(), 0));
  return kOk;
}
EXPORT int aclrtCreateStream(void** out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

EXPORT int aclrtDestroyStream(void* handle) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> all(streams().lock);
  streams().alive.erase(stream);
  std::lock_guard<std::mutex> guard(stream->lock);
  stream->closed = true;
  stream->changed.notify_all();
  return kOk;
}

EXPORT int aclrtDestroyStreamForce(void* handle) {
  Stream* stream = resolve(handle);
  {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->queue.clear();
  }
  return aclrtDestroyStream(handle);
}

EXPORT int aclrtStreamGetId(void* stream, int32_t* id) {
  *id = resolve(stream)->id;
  return kOk;
}

EXPORT int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout_ms) {
  Line("sync").text("kind", "stream").number("stream", resolve(stream)->id);
  const int code = synchronize(resolve(stream), timeout_ms);
  flush_trace();
  return code;
}
EXPORT int aclrtSynchronizeStream(void* stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  Line("sync").text("kind", "device");
  const int code = synchronize_all(timeout_ms);
  flush_trace();
  return code;
}
EXPORT int aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

EXPORT int aclrtStreamQuery(void* handle, int* status) {
  Stream* stream = resolve(handle);
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (stream->capture) {
      return fail(kStreamCaptured, "the host cannot query a stream that is being captured");
    }
  }
  std::lock_guard<std::mutex> guard(stream->lock);
  *status = stream->queue.empty() && !stream->busy ? 0 : 1;
  return kOk;
}
