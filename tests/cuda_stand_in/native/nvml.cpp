// libnvidia-ml.so.1 for the GPUs of cuda_stand_in.cpp; CUDA_STAND_IN_MIG=2: each GPU has that many MIG devices
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#define API extern "C" __attribute__((visibility("default")))
static const char* env(const char* n, const char* d) {
  const char* v = getenv(n);
  return v && *v ? v : d;
}
static int count() { return atoi(env("CUDA_STAND_IN_DEVICES", "2")); }
static int migs() { return atoi(env("CUDA_STAND_IN_MIG", "0")); }
static bool is(const char* k) { return !strcmp(env("CUDA_STAND_IN_GPU", "t4"), k); }
static unsigned long memory() { return is("h100") ? 85520809984ul : is("p100") ? 17179869184ul : 16106127360ul; }
struct Handle {
  int gpu, mig;
};
static Handle H[16][9];
struct Usage {
  std::atomic<int> pid[64];
  std::atomic<long> bytes[64];
};
API int nvmlInit_v2() { return count() ? 0 : 9; }
API int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
API int nvmlShutdown() { return 0; }
API const char* nvmlErrorString(int e) {
  return e == 2 ? "Invalid Argument" : e == 3 ? "Not Supported" : e == 6 ? "Not Found" : "Driver Not Loaded";
}
API int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = count();
  return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, Handle** h) {
  if (i >= (unsigned)count()) return 2;
  H[i][0] = {(int)i, -1};
  *h = &H[i][0];
  return 0;
}
API int nvmlDeviceGetMaxMigDeviceCount(Handle*, unsigned* n) {
  *n = migs() ? 7 : 0;
  return 0;
}
API int nvmlDeviceGetMigDeviceHandleByIndex(Handle* h, unsigned i, Handle** m) {
  if ((int)i >= migs()) return 6;
  H[h->gpu][i + 1] = {h->gpu, (int)i};
  *m = &H[h->gpu][i + 1];
  return 0;
}
API int nvmlDeviceGetMigMode(Handle*, unsigned* a, unsigned* b) {
  *a = *b = migs() > 0;
  return 0;
}
API int nvmlDeviceGetName(Handle*, char* b, unsigned n) {
  snprintf(b, n, "%s", is("h100") ? "NVIDIA H100 80GB HBM3" : is("p100") ? "Tesla P100-PCIE-16GB" : "Tesla T4");
  return 0;
}
API int nvmlDeviceGetUUID(Handle* h, char* b, unsigned n) {
  if (h->mig >= 0)
    snprintf(b, n, "MIG-%08x-5555-6666-7777-%012d", 0xfa4e0000 + h->gpu, h->mig);
  else
    snprintf(b, n, "GPU-%08x-1111-2222-3333-44444444444%d", 0xfa4e0000 + h->gpu, h->gpu);
  return 0;
}
API int nvmlDeviceGetCudaComputeCapability(Handle*, int* a, int* b) {
  *a = is("h100") ? 9 : is("p100") ? 6 : 7;
  *b = is("h100") || is("p100") ? 0 : 5;
  return 0;
}
struct Memory {
  unsigned long long total, free, used;
};
API int nvmlDeviceGetMemoryInfo(Handle* h, Memory* m) {
  std::string p = std::string(env("CUDA_STAND_IN_FOLDER", "/dev/shm")) + "/memory-" + std::to_string(h->gpu);
  long s = 450l << 20;
  int f = open(p.c_str(), O_RDONLY);
  if (f >= 0) {
    auto* u = (Usage*)mmap(0, sizeof(Usage), PROT_READ, MAP_SHARED, f, 0);
    close(f);
    if (u != MAP_FAILED) {
      for (int i = 0; i < 64; i++)
        if (u->pid[i] && !kill(u->pid[i], 0)) s += u->bytes[i];
      munmap(u, sizeof(Usage));
    }
  }
  m->total = h->mig >= 0 ? memory() / 7 : memory();
  m->used = s;
  m->free = m->total - s;
  return 0;
}
API int nvmlDeviceGetUtilizationRates(Handle* h, unsigned* u) {
  if (h->mig >= 0) return 3;
  u[0] = 37;
  u[1] = 5;
  return 0;
}
API int nvmlDeviceGetPowerUsage(Handle* h, unsigned* p) {
  if (h->mig >= 0) return 3;
  *p = 34500;
  return 0;
}
API int nvmlSystemGetDriverVersion(char* b, unsigned n) {
  snprintf(b, n, "580.65.06");
  return 0;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13000;
  return 0;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, Handle** h) {
  H[0][0] = {0, -1};
  *h = &H[0][0];
  return 0;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(...) { return 3; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(...) { return 3; }
API int nvmlDeviceGetComputeRunningProcesses(...) { return 3; }
