// Events, values that streams wait for, and host functions: how streams, and the host, wait for each other.
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace software_acl {
namespace {

void merge(std::map<Stream*, size_t>& into, const std::map<Stream*, size_t>& from) {
  for (const auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}

void signal(const std::shared_ptr<Event::State>& state) {
  std::lock_guard<std::mutex> guard(state->lock);
  state->when = std::chrono::steady_clock::now();
  state->done = true;
  state->changed.notify_all();
}

void await(const std::shared_ptr<Event::State>& state) {
  std::unique_lock<std::mutex> guard(state->lock);
  state->changed.wait(guard, [&] { return state->done; });
}

}  // namespace
}  // namespace software_acl

using namespace software_acl;

EXPORT int aclrtCreateEventExWithFlag(void** out, uint32_t flag) {
  auto* event = new Event;
  event->flag = flag;
  *out = event;
  return kOk;
}
EXPORT int aclrtCreateEventWithFlag(void** out, uint32_t flag) { return aclrtCreateEventExWithFlag(out, flag); }

EXPORT int aclrtDestroyEvent(void* event) {
  delete static_cast<Event*>(event);  // tasks hold the state, not the event
  return kOk;
}

EXPORT int aclrtRecordEvent(void* handle, void* target) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = resolve(target);
  auto state = std::make_shared<Event::State>();
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    event->state = state;
    event->capture = stream->capture;
    event->seen = stream->seen;
    if (stream->capture) return kOk;
  }
  return submit(stream, {"event record", [=] { signal(state); }, false, true});
}

EXPORT int aclrtStreamWaitEvent(void* target, void* handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = resolve(target);
  std::shared_ptr<Event::State> state;
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    state = event->state;
    if (!state) return kOk;  // never recorded: nothing to wait for
    if (event->capture) {
      const bool open = open_captures().count(event->capture->id) != 0;
      if (stream->capture && stream->capture != event->capture) {
        stream->capture->invalid = true;
        return fail(kCaptureDependency, "an event of one capture is waited for in another");
      }
      if (!open) return fail(kCaptureUnmatched, "an event recorded inside a capture is waited for outside it");
      if (!stream->capture) {
        stream->capture = event->capture;
        stream->seen.clear();
        event->capture->lengths.emplace(stream, 0);
      }
      merge(stream->seen, event->seen);
      return kOk;
    }
    if (stream->capture) {
      stream->capture->invalid = true;
      return fail(kCaptureDependency, "a captured stream waits for work that is not captured");
    }
  }
  return submit(stream, {"event wait", [=] { await(state); }, false, true});
}

EXPORT int aclrtResetEvent(void*, void*) { return kOk; }

EXPORT int aclrtSynchronizeEvent(void* handle) {
  auto* event = static_cast<Event*>(handle);
  Line("sync").text("kind", "event");
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (event->capture && open_captures().count(event->capture->id) != 0) {
      return fail(kStreamCaptured, "the host cannot wait for an event that was recorded in an open capture");
    }
    if (event->capture) return kOk;
  }
  if (event->state) await(event->state);
  flush_trace();
  return kOk;
}

EXPORT int aclrtQueryEventStatus(void* handle, int* status) {
  auto* event = static_cast<Event*>(handle);
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    if (event->capture && open_captures().count(event->capture->id) != 0) {
      return fail(kStreamCaptured, "the host cannot query an event that was recorded in an open capture");
    }
  }
  *status = 1;
  if (!event->state || event->capture) return kOk;
  std::lock_guard<std::mutex> guard(event->state->lock);
  *status = event->state->done ? 1 : 0;
  return kOk;
}

EXPORT int aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;
  return kOk;
}

EXPORT int aclrtEventElapsedTime(float* ms, void* from, void* to) {
  auto *begin = static_cast<Event*>(from)->state.get(), *end = static_cast<Event*>(to)->state.get();
  if (begin == nullptr || end == nullptr) return fail(kInvalidParameter, "an event that was never recorded");
  *ms = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
  return kOk;
}

EXPORT int aclrtEventGetTimestamp(void* handle, uint64_t* microseconds) {
  auto* state = static_cast<Event*>(handle)->state.get();
  if (state == nullptr) return kInvalidParameter;
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(state->when.time_since_epoch()).count();
  return kOk;
}

// External events of newer torch_npu versions: a word in device memory that one stream writes and another waits for.
namespace {
std::mutex value_lock;
std::condition_variable value_changed;

bool holds(uint64_t found, uint64_t value, uint32_t condition) {
  switch (condition) {
    case 0: return static_cast<int64_t>(found - value) >= 0;
    case 1: return found == value;
    case 2: return (found & value) != 0;
    default: return ~(found | value) != 0;
  }
}
}  // namespace

EXPORT int aclrtValueWrite(void* address, uint64_t value, uint32_t, void* stream) {
  Task task{"value write", nullptr, false};
  task.run = [=] {
    std::lock_guard<std::mutex> guard(value_lock);
    std::memcpy(host_view(address), &value, sizeof value);
    value_changed.notify_all();
  };
  return submit(resolve(stream), std::move(task));
}

EXPORT int aclrtValueWait(void* address, uint64_t value, uint32_t condition, void* stream) {
  Task task{"value wait", nullptr, false};
  task.run = [=] {
    std::unique_lock<std::mutex> guard(value_lock);
    value_changed.wait(guard, [&] {
      uint64_t found;
      std::memcpy(&found, host_view(address), sizeof found);
      return holds(found, value, condition);
    });
  };
  return submit(resolve(stream), std::move(task));
}

EXPORT int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  return submit(resolve(stream), {"host function", [=] { function(argument); }, false});
}
EXPORT int aclrtLaunchCallback(void (*function)(void*), void* argument, int, void* stream) {
  return aclrtLaunchHostFunc(stream, function, argument);
}
EXPORT int aclrtSubscribeReport(uint64_t, void*) { return kOk; }
EXPORT int aclrtUnSubscribeReport(uint64_t, void*) { return kOk; }
EXPORT int aclrtProcessReport(int32_t timeout_ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(std::min(timeout_ms < 0 ? 10 : timeout_ms, 10)));
  return kOk;
}
