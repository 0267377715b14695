// Captured graphs: tasks recorded in the order the host issued them, which is a legal order of any fork and join among
// captured streams; replay is one task that runs them; an update swaps single tasks in stream order.
#include <algorithm>
#include <fstream>

#include "runtime.h"

namespace software_acl {
namespace {

struct Graphs {
  std::map<Graph*, std::shared_ptr<Graph>> alive;  // guarded by capture_lock()
  uint32_t next = 1;
};

Graphs& graphs() {
  static auto* instance = new Graphs;
  return *instance;
}

thread_local int thread_mode = kGlobal;
thread_local uint32_t running = 0;

std::map<std::string, int> count_tasks(const Graph& graph) {
  std::map<std::string, int> counts;
  for (const auto& slot : graph.slots) ++counts[slot->task->name];
  return counts;
}

std::shared_ptr<Graph> find(void* handle) {
  auto it = graphs().alive.find(static_cast<Graph*>(handle));
  return it == graphs().alive.end() ? nullptr : it->second;
}

bool is_group(const void* handle) {
  for (const auto& [address, graph] : graphs().alive) {
    for (const auto& group : graph->groups) {
      if (group.get() == handle) return true;
    }
  }
  return false;
}

// Why a capture that is being ended is not usable, or kOk.
int fault_of(const Graph& graph, const Stream& origin) {
  if (graph.invalid) return fail(kInvalidated, "an earlier error has spoiled this capture");
  if (origin.open_group) return fail(kTaskGroup, "a task group was left open");
  for (const auto& [stream, length] : graph.lengths) {
    auto it = origin.seen.find(stream);
    if (stream != &origin && length > (it == origin.seen.end() ? 0 : it->second)) {
      return fail(kUnjoined, "a stream that was forked from the captured one was not joined");
    }
  }
  return kOk;
}

void run(Graph& graph) {
  std::lock_guard<std::mutex> one_at_a_time(graph.execution);
  struct Running {  // also when a kernel throws
    explicit Running(uint32_t id) { running = id; }
    ~Running() { running = 0; }
  } here(graph.id);
  for (const auto& slot : graph.slots) {
    TaskRef task;
    {
      std::lock_guard<std::mutex> guard(capture_lock());
      task = slot->task;
    }
    if (!task->run) continue;
    try {
      task->run();
    } catch (const std::exception& error) {
      throw std::runtime_error("captured " + task->name + ": " + error.what());
    }
  }
}

}  // namespace

std::map<uint32_t, std::shared_ptr<Graph>>& open_captures() {
  static auto* open = new std::map<uint32_t, std::shared_ptr<Graph>>;
  return *open;
}

uint32_t running_graph() { return running; }

int count_graphs() {
  std::lock_guard<std::mutex> guard(capture_lock());
  return static_cast<int>(graphs().alive.size());
}

int refuse_synchronous(const char* call) {
  if (thread_mode == kRelaxed) return kOk;
  std::lock_guard<std::mutex> guard(capture_lock());
  for (auto& [id, graph] : open_captures()) {
    const bool own = graph->owner == std::this_thread::get_id();
    if (graph->mode == kGlobal || (graph->mode == kThreadLocal && own)) {
      graph->invalid = true;
      return fail(kNotPermitted, std::string(call) + " is not permitted while a capture is open");
    }
  }
  return kOk;
}

}  // namespace software_acl

using namespace software_acl;

EXPORT int software_acl_live_graphs() { return count_graphs(); }

EXPORT int aclmdlRICaptureBegin(void* handle, int mode) {
  static const int stream_limit = std::stoi(setting("SOFTWARE_ACL_STREAMS", "2048"));
  static const int graph_limit = std::stoi(setting("SOFTWARE_ACL_GRAPHS", "1000000"));
  const int used = count_streams(), live = count_graphs();
  if (live >= graph_limit || used + live >= stream_limit) {
    return fail(kNoStream, "out of streams: " + std::to_string(live) + " captured graphs are alive");
  }
  if (handle == nullptr) return fail(kDefaultStream, "the default stream cannot be captured");
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  if (stream->capture) return fail(kStreamCaptured, "this stream is being captured already");
  auto graph = std::make_shared<Graph>();
  graph->id = graphs().next++;
  graph->mode = mode;
  graph->origin = stream;
  graph->owner = std::this_thread::get_id();
  graph->lengths[stream] = 0;
  graphs().alive[graph.get()] = graph;
  open_captures()[graph->id] = graph;
  stream->capture = graph;
  stream->seen.clear();
  Line("capture_begin").number("graph", graph->id).number("stream", stream->id).number("mode", mode);
  return kOk;
}

EXPORT int aclmdlRICaptureEnd(void* handle, void** out) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  auto graph = stream->capture;
  if (!graph) return fail(kNotCapturing, "this stream is not being captured");
  if (graph->origin != stream) return fail(kCaptureUnmatched, "a capture ends on the stream it began on");
  if (graph->mode != kRelaxed && graph->owner != std::this_thread::get_id()) {
    return fail(kWrongThread, "a capture ends on the thread it began on");
  }
  const int code = fault_of(*graph, *stream);
  for (auto& [member, length] : graph->lengths) {
    member->capture.reset();
    member->open_group.reset();
    member->seen.clear();
  }
  open_captures().erase(graph->id);
  Line("capture_end").number("graph", graph->id).number("code", code).number("tasks", graph->slots.size())
      .counts("ops", count_tasks(*graph));
  flush_trace();
  *out = code == kOk ? graph.get() : nullptr;
  if (code != kOk) graphs().alive.erase(graph.get());
  return code;
}

EXPORT int aclmdlRICaptureGetInfo(void* handle, int* status, void** graph) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
  if (graph != nullptr) *graph = stream->capture.get();
  return kOk;
}

EXPORT int aclmdlRIGetId(void* handle, uint32_t* id) {
  std::lock_guard<std::mutex> guard(capture_lock());
  auto graph = find(handle);
  if (!graph) return fail(kInvalidParameter, "no such graph");
  *id = graph->id;
  return kOk;
}

EXPORT int aclmdlRICaptureThreadExchangeMode(int* mode) {
  std::swap(thread_mode, *mode);
  return kOk;
}

EXPORT int aclmdlRIExecuteAsync(void* handle, void* target) {
  std::shared_ptr<Graph> graph;
  Stream* stream = resolve(target);
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    graph = find(handle);
    if (!graph) return fail(kInvalidParameter, "no such graph");
    if (open_captures().count(graph->id) != 0) return fail(kNotPermitted, "this graph is still being captured");
    if (stream->capture) {
      stream->capture->invalid = true;
      return fail(kNotPermitted, "a graph cannot be replayed into a capture");
    }
  }
  Line("replay").number("graph", graph->id).number("stream", stream->id).number("tasks", graph->slots.size());
  Task task{"replay", [graph] {
              run(*graph);
              Line("replayed").number("graph", graph->id);
            }, false};
  return submit(stream, std::move(task));
}

EXPORT int aclmdlRIDestroy(void* handle) {
  std::shared_ptr<Graph> graph;  // destroyed after the lock is released
  std::lock_guard<std::mutex> guard(capture_lock());
  graph = find(handle);
  if (!graph) return fail(kInvalidParameter, "no such graph");
  graphs().alive.erase(graph.get());
  Line("destroy").number("graph", graph->id);
  return kOk;
}

EXPORT int aclmdlRICaptureTaskGrpBegin(void* handle) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  if (!stream->capture) return fail(kNotCapturing, "a task group outside a capture");
  if (stream->open_group) {
    stream->capture->invalid = true;
    return fail(kTaskGroup, "a task group inside a task group");
  }
  stream->open_group = std::make_shared<Group>(Group{stream->capture.get(), {}});
  return kOk;
}

EXPORT int aclmdlRICaptureTaskGrpEnd(void* handle, void** out) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  if (!stream->capture) return fail(kNotCapturing, "a task group outside a capture");
  if (!stream->open_group) return fail(kTaskGroup, "no task group is open");
  *out = stream->open_group.get();
  stream->capture->groups.push_back(std::move(stream->open_group));
  stream->open_group.reset();
  return kOk;
}

EXPORT int aclmdlRICaptureTaskUpdateBegin(void* handle, void* group) {
  Stream* stream = resolve(handle);
  std::lock_guard<std::mutex> guard(capture_lock());
  if (!is_group(group)) return fail(kInvalidParameter, "no such task group");
  if (stream->capture) return fail(kNotPermitted, "an update on a stream that is being captured");
  if (stream->updating != nullptr) return fail(kTaskGroup, "an update inside an update");
  stream->updating = static_cast<Group*>(group);
  stream->update.clear();
  return kOk;
}

EXPORT int aclmdlRICaptureTaskUpdateEnd(void* handle) {
  Stream* stream = resolve(handle);
  std::vector<TaskRef> tasks;
  std::shared_ptr<Graph> owner;
  Group* group = nullptr;
  {
    std::lock_guard<std::mutex> guard(capture_lock());
    group = stream->updating;
    if (group == nullptr) return fail(kTaskGroup, "no update is open");
    tasks.swap(stream->update);
    stream->updating = nullptr;
    owner = find(group->graph);
    if (!owner) return fail(kUpdateFailed, "the graph of this task group is gone");
    if (tasks.size() < group->slots.size()) {
      return fail(kHostInternal, "the update brought " + std::to_string(tasks.size()) + " of " +
                                     std::to_string(group->slots.size()) + " operators");
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (i >= group->slots.size() || tasks[i]->name != group->slots[i]->task->name) {
        return fail(kUpdateFailed, tasks[i]->name + " does not match what the task group holds");
      }
    }
  }
  Line line("update");
  line.number("graph", owner->id).number("stream", stream->id).number("tasks", tasks.size());
  if (!tasks.empty()) line.text("op", tasks.front()->name);
  Task task{"task update", [owner, group, tasks] {
              std::lock_guard<std::mutex> guard(capture_lock());
              for (size_t i = 0; i < tasks.size(); ++i) group->slots[i]->task = tasks[i];
            }, false};
  return submit(stream, std::move(task));
}

EXPORT int aclmdlRIDebugJsonPrint(void* handle, const char* path, uint32_t) {
  std::lock_guard<std::mutex> guard(capture_lock());
  auto graph = find(handle);
  if (!graph) return fail(kInvalidParameter, "no such graph");
  std::ofstream out(path);
  out << "[";
  for (size_t i = 0; i < graph->slots.size(); ++i) {  // the trace format of browsers, one thread for each stream
    const Slot& slot = *graph->slots[i];
    out << (i == 0 ? "" : ",\n") << "{\"name\": \"" << slot.task->name << "\", \"ph\": \"X\", \"pid\": 0, \"tid\": "
        << slot.stream << ", \"ts\": " << i << ", \"dur\": 0.5}";
  }
  out << "]\n";
  return out ? kOk : fail(kInvalidParameter, "cannot write the graph");
}

EXPORT int aclmdlRIDebugPrint(void*) { return kOk; }
