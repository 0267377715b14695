// Initialisation, devices, contexts, versions: what torch_npu asks before the first operator runs.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace software_acl {
namespace {

constexpr int kMaxDevices = 8;
thread_local int device_of_thread = -1;
int contexts[kMaxDevices];  // only their addresses matter
std::mutex options_lock;
auto& options = *new std::map<int, int64_t>;

int device_count() {
  static const int count = std::clamp(std::stoi(setting("SOFTWARE_ACL_DEVICES", "1")), 1, kMaxDevices);
  return count;
}

}  // namespace

int current_device() { return device_of_thread; }

}  // namespace software_acl

using namespace software_acl;

EXPORT int aclInit(const char*) { return kOk; }
EXPORT int aclFinalize() {
  synchronize_all(2000);  // kernels must not run while the process is taken apart
  flush_trace();
  return kOk;
}
EXPORT int aclrtGetDeviceCount(uint32_t* count) {
  *count = device_count();
  return kOk;
}
EXPORT int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice, "no such device");
  device_of_thread = device;
  return kOk;
}
EXPORT int aclrtGetDevice(int32_t* device) {
  if (device_of_thread < 0) return kNoContext;
  *device = device_of_thread;
  return kOk;
}
EXPORT int aclrtResetDevice(int32_t) {
  synchronize_all(2000);
  return kOk;
}
EXPORT int aclrtGetCurrentContext(void** context) {
  if (device_of_thread < 0) return kNoContext;
  *context = &contexts[device_of_thread];
  return kOk;
}
EXPORT int aclrtSetCurrentContext(void* context) {
  const auto index = static_cast<int*>(context) - contexts;
  if (index < 0 || index >= kMaxDevices) return fail(kInvalidParameter, "no such context");
  device_of_thread = static_cast<int>(index);
  return kOk;
}
EXPORT int aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  *active = device == device_of_thread ? 1 : 0;
  return kOk;
}

EXPORT const char* aclrtGetSocName() {
  static const std::string name = setting("SOFTWARE_ACL_SOC", "Ascend910B3");
  return name.c_str();
}
EXPORT int aclGetDeviceCapability(uint32_t, uint32_t what, int64_t* value) {
  *value = what == 0 ? 20 : what == 1 ? 40 : 192 << 20;  // cube cores, vector cores, bytes of L2 cache
  return kOk;
}
// The version is the first of the structure's text fields.
EXPORT int aclsysGetCANNVersion(int package, char* version) {
  constexpr int kDriver = 7;
  if (package == kDriver) return kFeature;
  static const std::string text = setting("SOFTWARE_ACL_CANN", "8.5.0");
  std::snprintf(version, 128, "%s", text.c_str());
  return kOk;
}
EXPORT int aclrtDeviceCanAccessPeer(int32_t* yes, int32_t, int32_t) {
  *yes = 1;
  return kOk;
}
EXPORT int aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return kOk; }
EXPORT int aclrtDeviceGetBareTgid(int32_t* id) {
  *id = 1;
  return kOk;
}
EXPORT int aclrtGetDeviceUtilizationRate(int32_t, void*) { return kFeature; }
EXPORT int aclrtSetDeviceSatMode(int) { return kOk; }
EXPORT int aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kOk; }
EXPORT int aclrtGetStreamOverflowSwitch(void*, uint32_t* on) {
  *on = 0;
  return kOk;
}
EXPORT int aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
EXPORT int aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
EXPORT int aclrtSetOpExecuteTimeOutV2(uint64_t wanted, uint64_t* actual) {
  *actual = wanted;
  return kOk;
}
EXPORT int aclrtSetStreamFailureMode(void*, uint64_t) { return kOk; }
EXPORT int aclrtSetStreamAttribute(void*, int, void*) { return kOk; }
EXPORT int aclrtCtxSetSysParamOpt(int, int64_t) { return kOk; }
EXPORT int aclrtSetSysParamOpt(int option, int64_t value) {
  std::lock_guard<std::mutex> guard(options_lock);
  options[option] = value;
  return kOk;
}
EXPORT int aclrtGetSysParamOpt(int option, int64_t* value) {
  std::lock_guard<std::mutex> guard(options_lock);
  *value = options[option];
  return kOk;
}
EXPORT int aclrtPeekAtLastError(int) { return kOk; }
EXPORT int aclrtGetLastError(int) { return kOk; }
EXPORT int aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
  *value = 0;
  return kOk;
}

// Limits of cores, by stream: kept and returned, of no effect on a CPU.
namespace {
constexpr uint32_t kCores[] = {20, 40};
std::map<std::pair<void*, int>, uint32_t>& core_limits() {
  static auto* limits = new std::map<std::pair<void*, int>, uint32_t>;
  return *limits;
}
thread_local void* limiting_stream = nullptr;

uint32_t core_limit(void* stream, int type) {
  std::lock_guard<std::mutex> guard(options_lock);
  auto it = core_limits().find({stream, type});
  return it == core_limits().end() ? kCores[type & 1] : it->second;
}
}  // namespace
EXPORT int aclrtGetStreamResLimit(void* stream, int type, uint32_t* value) {
  *value = core_limit(stream, type);
  return kOk;
}
EXPORT int aclrtSetStreamResLimit(void* stream, int type, uint32_t value) {
  std::lock_guard<std::mutex> guard(options_lock);
  core_limits()[{stream, type}] = value;
  return kOk;
}
EXPORT int aclrtResetStreamResLimit(void* stream) {
  std::lock_guard<std::mutex> guard(options_lock);
  for (int type : {0, 1}) core_limits().erase({stream, type});
  return kOk;
}
EXPORT int aclrtGetDeviceResLimit(int32_t, int type, uint32_t* value) {
  *value = core_limit(&contexts, type);
  return kOk;
}
EXPORT int aclrtSetDeviceResLimit(int32_t, int type, uint32_t value) {
  return aclrtSetStreamResLimit(&contexts, type, value);
}
EXPORT int aclrtResetDeviceResLimit(int32_t) { return aclrtResetStreamResLimit(&contexts); }
EXPORT int aclrtUseStreamResInCurrentThread(void* stream) {
  limiting_stream = stream;
  return kOk;
}
EXPORT int aclrtUnuseStreamResInCurrentThread(void*) {
  limiting_stream = nullptr;
  return kOk;
}
EXPORT int aclrtGetResInCurrentThread(int type, uint32_t* value) {
  *value = core_limit(limiting_stream, type);
  return kOk;
}

// Calls that exist only so that the wheel loads. Whoever uses one learns its name.
#define ABSENT(name) \
  EXPORT int name() { return fail(kFeature, "the software ACL does not implement " #name); }
ABSENT(aclrtMemExportToShareableHandle)
ABSENT(aclrtMemImportFromShareableHandle)
ABSENT(aclrtMemSetPidToShareableHandle)
ABSENT(aclrtBinaryGetFunction)
ABSENT(aclrtBinaryLoadFromData)
ABSENT(aclrtGetFunctionAddr)
ABSENT(rtDevBinaryRegister)
ABSENT(rtFunctionRegister)
ABSENT(rtGetC2cCtrlAddr)
ABSENT(rtKernelLaunch)

EXPORT int aclmdlInitDump() { return kOk; }
EXPORT int aclmdlSetDump(const char*) { return kOk; }
EXPORT int aclmdlFinalizeDump() { return kOk; }
EXPORT void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
EXPORT uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
EXPORT int MsprofRegisterCallback(uint32_t, void*) { return 0; }
EXPORT int MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
EXPORT int MsprofReportApi(uint32_t, const void*) { return 0; }
EXPORT int MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
EXPORT uint64_t MsprofSysCycleTime() { return 0; }

// The older operator interface: descriptors can be made, no operator runs.
EXPORT int aclopCompileAndExecute(const char* op) {
  return fail(kUnsupportedOperator, std::string("the software ACL does not implement the operator ") + op);
}
EXPORT int aclopCompileAndExecuteV2(const char* op) { return aclopCompileAndExecute(op); }
EXPORT int aclSetCompileopt(int, const char*) { return kOk; }
EXPORT size_t aclGetCompileoptSize(int) { return 256; }
EXPORT int aclGetCompileopt(int, char* value, size_t room) {
  if (room > 0) value[0] = '\0';
  return kOk;
}

namespace {
struct Desc {
  int type, format;
  std::vector<int64_t> dims;
};
int dummy;
}  // namespace
EXPORT void* aclCreateTensorDesc(int type, int count, const int64_t* dims, int format) {
  return new Desc{type, format, std::vector<int64_t>(dims, dims + count)};
}
EXPORT void aclDestroyTensorDesc(void* desc) { delete static_cast<Desc*>(desc); }
EXPORT int aclGetTensorDescType(void* desc) { return static_cast<Desc*>(desc)->type; }
EXPORT int aclGetTensorDescFormat(void* desc) { return static_cast<Desc*>(desc)->format; }
EXPORT size_t aclGetTensorDescNumDims(void* desc) { return static_cast<Desc*>(desc)->dims.size(); }
EXPORT int aclGetTensorDescDimV2(void* desc, size_t index, int64_t* size) {
  *size = static_cast<Desc*>(desc)->dims.at(index);
  return kOk;
}
EXPORT void aclSetTensorDescName(void*, const char*) {}
EXPORT int aclSetTensorFormat(void*, int) { return kOk; }
EXPORT int aclSetTensorPlaceMent(void*, int) { return kOk; }
EXPORT int aclSetTensorShape(void*, int, const int64_t*) { return kOk; }
EXPORT int aclSetTensorShapeRange(void*, int, void*) { return kOk; }
EXPORT int aclSetTensorConst(void*, void*, size_t) { return kOk; }
EXPORT void* aclCreateDataBuffer(void*, size_t) { return &dummy; }
EXPORT int aclDestroyDataBuffer(const void*) { return kOk; }
EXPORT void* aclopCreateAttr() { return &dummy; }
EXPORT void aclopDestroyAttr(const void*) {}
#define IGNORED(name) \
  EXPORT int name() { return kOk; }
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)
