// What both halves of the software ACL share, the runtime (libascendcl) and the operators (libopapi): error codes,
// settings, the trace, and how a kernel enters a stream. Every prototype in this folder is declared from the public API
// reference and from torch_npu's BSD-3 sources; no CANN header is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define SHARED __attribute__((visibility("default")))

namespace software_acl {

// Error codes as torch_npu's users see them; the comments name the situation in which this double returns them.
enum Code : int {
  kOk = 0,
  kUnsupportedOperator = 100024,
  kInvalidParameter = 107000,
  kInvalidDevice = 107001,
  kNoContext = 107002,
  kStreamTimeout = 107020,
  kCaptureDependency = 107022,   // an event recorded in one capture is waited for in another
  kCaptureUnmatched = 107024,    // an event recorded inside a capture is used outside it
  kUnjoined = 107025,            // a forked stream was not joined before the capture ended
  kStreamCaptured = 107027,      // the host waits for a stream that is being captured
  kNotCapturing = 107029,        // capture end, or a task group, on a stream that is not being captured
  kNotPermitted = 107030,        // a synchronous call while a capture in global mode is open
  kDefaultStream = 107031,       // work on the default stream while a capture is open
  kTaskGroup = 107033,           // a task group inside a task group, or one that was left open
  kNotAGraphTask = 107034,       // something in a task group that no update can replace
  kWrongThread = 107038,         // a capture is ended by another thread than the one that began it
  kUpdateFailed = 107040,        // an update brings other operators than the group holds
  kPageable = 107041,            // an asynchronous copy of pageable host memory inside a capture
  kFeature = 207000,
  kNoMemory = 207001,
  kNoResource = 207005,
  kNoEvent = 207007,
  kNoStream = 207008,
  kHostInternal = 507000,        // an update brings fewer operators than the group holds
  kKernelFailed = 507015,
  kInvalidated = 507903,         // a capture is ended that an earlier error had spoiled
  kTiling = 561002,              // an operator refuses its shapes
};

// Thrown by operator checks; becomes the return value of the aclnn call.
struct Refused : std::runtime_error {
  int code;
  Refused(int code, const std::string& what) : std::runtime_error(what), code(code) {}
};

// ---- settings and trace -------------------------------------------------------------------------------------------
SHARED std::string setting(const char* name, const char* fallback);
SHARED int fail(int code, const std::string& message);  // remembers the message for aclGetRecentErrMsg

// One JSON line, written when the object goes out of scope.
class SHARED Line {
 public:
  explicit Line(const char* event);
  ~Line();
  Line& text(const char* key, const std::string& value);
  Line& number(const char* key, int64_t value);
  Line& counts(const char* key, const std::map<std::string, int>& value);
  Line& lists(const char* key, const std::vector<std::vector<int64_t>>& value);

 private:
  bool on_;
  std::ostringstream out_;
};

// ---- memory and streams ---------------------------------------------------------------------------------------------
SHARED void* host_view(const void* address);  // where kernels find the bytes of a device address; else the address
SHARED int64_t device_address(const void* view);  // the way back: what the program calls the memory a kernel sees
SHARED uint32_t running_graph();                  // the graph whose replay this thread is running; 0 for none

struct Task {
  std::string name;
  std::function<void()> run;
  bool kernel = true;   // only kernels may be in a task group
  bool always = false;  // runs on a failed stream too (signals that others wait for)
};

struct Stream;
SHARED Stream* resolve(void* stream);          // nullptr is the device's default stream
SHARED int submit(Stream* stream, Task task);  // runs, captures, or collects for an update

}  // namespace software_acl
