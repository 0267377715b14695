// Settings, error messages and the trace: one JSON object a line, which tells "captured" from "looks right".
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "runtime.h"

namespace software_acl {
namespace {

thread_local std::string recent_message;
thread_local std::string handed_out;

struct TraceFile {
  std::mutex lock;
  FILE* file = nullptr;
  TraceFile() {
    const char* path = std::getenv("SOFTWARE_ACL_TRACE");
    if (path != nullptr && *path != '\0') file = std::fopen(path, "a");
  }
};

TraceFile& trace_file() {
  static auto* file = new TraceFile;  // never destroyed: worker threads may outlive main()
  return *file;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

__attribute__((destructor)) void flush_at_exit() { flush_trace(); }

}  // namespace

std::string setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? fallback : value;
}

int fail(int code, const std::string& message) {
  recent_message = message;
  Line("error").number("code", code).text("message", message);
  return code;
}

Line::Line(const char* event) : on_(trace_file().file != nullptr) {
  if (on_) out_ << "{\"event\": " << quoted(event);
}

Line::~Line() {
  if (!on_) return;
  out_ << "}\n";
  const std::string line = out_.str();
  std::lock_guard<std::mutex> guard(trace_file().lock);
  std::fwrite(line.data(), 1, line.size(), trace_file().file);
}

Line& Line::text(const char* key, const std::string& value) {
  if (on_) out_ << ", " << quoted(key) << ": " << quoted(value);
  return *this;
}

Line& Line::number(const char* key, int64_t value) {
  if (on_) out_ << ", " << quoted(key) << ": " << value;
  return *this;
}

Line& Line::counts(const char* key, const std::map<std::string, int>& value) {
  if (!on_) return *this;
  out_ << ", " << quoted(key) << ": {";
  const char* separator = "";
  for (const auto& [name, count] : value) {
    out_ << separator << quoted(name) << ": " << count;
    separator = ", ";
  }
  out_ << "}";
  return *this;
}

Line& Line::lists(const char* key, const std::vector<std::vector<int64_t>>& value) {
  if (!on_) return *this;
  out_ << ", " << quoted(key) << ": [";
  for (size_t i = 0; i < value.size(); ++i) {
    out_ << (i == 0 ? "[" : ", [");
    for (size_t j = 0; j < value[i].size(); ++j) out_ << (j == 0 ? "" : ", ") << value[i][j];
    out_ << "]";
  }
  out_ << "]";
  return *this;
}

void flush_trace() {
  std::lock_guard<std::mutex> guard(trace_file().lock);
  if (trace_file().file != nullptr) std::fflush(trace_file().file);
}

}  // namespace software_acl

EXPORT const char* aclGetRecentErrMsg() {
  using namespace software_acl;
  handed_out.swap(recent_message);
  recent_message.clear();
  return handed_out.c_str();
}

// For tests: a mark in the trace, so that "from here to there" can be counted.
EXPORT void software_acl_mark(const char* name) {
  software_acl::Line("mark").text("name", name);
  software_acl::flush_trace();
}
