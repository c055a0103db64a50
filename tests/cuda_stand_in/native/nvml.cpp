// libnvidia-ml.so.1: the GPUs and MIG devices of the machine, and the memory that all processes use on them.
#include "machine.hpp"

namespace {
enum Status { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, NO_LIBRARY = 12 };
const long RESERVED_BYTES = 450 << 20;  // on a GPU that nobody uses
const int MOST_PARTS = 7;
Device& handle_of(int gpu, int part) {
  static Device handles[MOST_GPUS][MOST_PARTS + 1];
  return handles[gpu][part + 1] = {gpu, part};
}
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
}  // namespace

API int nvmlInit_v2() { return atoi(setting("NVML", "1")) == 0 ? NO_LIBRARY : gpus() ? OK : DRIVER_NOT_LOADED; }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlShutdown() { return OK; }
API const char* nvmlErrorString(int) { return "error of the stand-in"; }
API int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  snprintf(text, length, "%s", atoi(setting("DRIVER", "13000")) < 13000 ? "535.104.05" : "580.65.06");
  return OK;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = atoi(setting("DRIVER", "13000"));
  return OK;
}
API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = gpus();
  return OK;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** handle) {
  if (index >= (unsigned)gpus()) return INVALID_ARGUMENT;
  *handle = &handle_of(index, -1);
  return OK;
}
API int nvmlDeviceGetHandleByUUID(const char* uuid, Device** handle) {
  for (int gpu = 0; gpu < gpus(); gpu++)
    for (int part = -1; part < parts(); part++)
      if (handle_of(gpu, part).uuid() == uuid) {
        *handle = &handle_of(gpu, part);
        return OK;
      }
  return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, Device** handle) {  // 0000:04:00.0 is the first GPU
  long bus = strlen(address) > 5 ? strtol(strchr(address, ':') + 1, nullptr, 16) : -1;
  return nvmlDeviceGetHandleByIndex_v2(bus - 4, handle);
}
API int nvmlDeviceGetMaxMigDeviceCount(Device*, unsigned* count) {
  *count = parts() ? MOST_PARTS : 0;
  return OK;
}
API int nvmlDeviceGetMigDeviceHandleByIndex(Device* gpu, unsigned index, Device** handle) {
  if ((int)index >= parts()) return NOT_FOUND;
  *handle = &handle_of(gpu->gpu, index);
  return OK;
}
API int nvmlDeviceGetMigMode(Device*, unsigned* current, unsigned* pending) {
  *current = *pending = parts() > 0;
  return OK;
}
API int nvmlDeviceGetName(Device*, char* text, unsigned length) {
  snprintf(text, length, "%s", model().name);
  return OK;
}
API int nvmlDeviceGetUUID(Device* device, char* text, unsigned length) {
  snprintf(text, length, "%s", device->uuid().c_str());
  return OK;
}
API int nvmlDeviceGetCudaComputeCapability(Device*, int* major, int* minor) {
  *major = model().major;
  *minor = model().minor;
  return OK;
}
API int nvmlDeviceGetMemoryInfo(Device* device, Memory* memory) {
  Usage* usage = usage_of(*device, false);
  memory->total = device->share(model().memory);
  memory->used = device->share(RESERVED_BYTES) + (usage ? usage->total() : 0);
  memory->free = memory->total - memory->used;
  if (usage) munmap(usage, sizeof *usage);
  return OK;
}
API int nvmlDeviceGetUtilizationRates(Device* device, Utilization* rates) {
  if (device->part >= 0) return NOT_SUPPORTED;
  *rates = {37, 5};
  return OK;
}
API int nvmlDeviceGetPowerUsage(Device* device, unsigned* milliwatts) {
  if (device->part >= 0) return NOT_SUPPORTED;
  *milliwatts = 34500;
  return OK;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(...) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(...) { return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeRunningProcesses(Device*, unsigned* count, void*) {  // in the message of an allocation that fails
  *count = 0;
  return OK;
}
