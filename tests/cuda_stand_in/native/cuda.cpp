// A CUDA driver, runtime, NCCL and CUPTI that need no GPU, for the CUDA build of torch. LD_PRELOAD this library.
//
// Device memory is host memory (mmap, zeroed, never touched unless written). Kernels compute nothing: they take time on
// the time line of their stream. Copies, memsets, events, waits between streams, and NCCL collectives happen in stream
// order, asynchronously to the host, by a thread that advances all streams. NCCL exchanges data through /dev/shm.
// CUDA_STAND_IN_GPU=t4|h100|p100, CUDA_STAND_IN_DEVICES=2, CUDA_STAND_IN_KERNEL_US=5, CUDA_STAND_IN_LOG=file
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#undef cudaGetDeviceProperties

// ------------------------------------------------------------------ the machine
static double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static const char* env(const char* n, const char* d) {
  const char* v = getenv(n);
  return v && *v ? v : d;
}
static void logf_(const char* f, ...) {
  static const char* path = getenv("CUDA_STAND_IN_LOG");
  if (!path) return;
  FILE* o = fopen(path, "a");
  if (!o) return;
  va_list a;
  va_start(a, f);
  fprintf(o, "%d ", getpid());
  vfprintf(o, f, a);
  fputc('\n', o);
  va_end(a);
  fclose(o);
}
API void stand_in_stub(const char* name) { logf_("stub %s", name); }  // generated stubs report themselves
struct Model {
  const char* key;
  const char* name;
  int major, minor, sms;
  size_t memory;
};
static const Model MODELS[] = {{"t4", "Tesla T4", 7, 5, 40, 15843721216ull},
                               {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85017493504ull},
                               {"p100", "Tesla P100-PCIE-16GB", 6, 0, 56, 17059545088ull}};
static const Model& model() {
  const char* k = env("CUDA_STAND_IN_GPU", "t4");
  for (auto& m : MODELS)
    if (!strcmp(m.key, k)) return m;
  return MODELS[0];
}
static int physical() { return atoi(env("CUDA_STAND_IN_DEVICES", "2")); }
static std::string uuid_of(int d) {
  char b[64];
  snprintf(b, 64, "GPU-%08x-1111-2222-3333-44444444444%d", 0xfa4e0000 + d, d);
  return b;
}
static std::vector<int>& visible() {  // CUDA_VISIBLE_DEVICES, read once, as CUDA does
  static std::vector<int>* v = [] {
    auto* r = new std::vector<int>;
    const char* e = getenv("CUDA_VISIBLE_DEVICES");
    if (!e) {
      for (int i = 0; i < physical(); i++) r->push_back(i);
      return r;
    }
    std::string s(e);
    size_t p = 0;
    while (p <= s.size()) {
      size_t q = s.find(',', p);
      std::string w = s.substr(p, q == std::string::npos ? q : q - p);
      int m = -1;
      while (!w.empty() && w[0] == ' ') w.erase(0, 1);
      for (int i = 0; i < physical(); i++)
        if (!w.empty() && (w == std::to_string(i) || (w.rfind("GPU-", 0) == 0 && uuid_of(i).rfind(w, 0) == 0))) m = i;
      bool dup = false;
      for (int x : *r) dup |= x == m;
      if (m < 0 || dup) break;
      r->push_back(m);
      if (q == std::string::npos) break;
      p = q + 1;
    }
    return r;
  }();
  return *v;
}
// memory in use per device and process, which NVML reads
struct Usage {
  std::atomic<int> pid[64];
  std::atomic<long> bytes[64];
};
static Usage* usage(int dev) {
  static Usage* u[16];
  if (!u[dev]) {
    std::string p = std::string(env("CUDA_STAND_IN_FOLDER", "/dev/shm")) + "/memory-" + std::to_string(dev);
    int f = open(p.c_str(), O_RDWR | O_CREAT, 0600);
    (void)!ftruncate(f, sizeof(Usage));
    u[dev] = (Usage*)mmap(0, sizeof(Usage), PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
    close(f);
  }
  return u[dev];
}
static void account(int dev, long by) {
  Usage* u = usage(visible()[dev]);
  int me = getpid();
  for (int i = 0; i < 64; i++)
    if (u->pid[i] == me) {
      u->bytes[i] += by;
      return;
    }
  for (int i = 0; i < 64; i++) {
    int o = u->pid[i];
    if (!o || kill(o, 0)) {
      u->pid[i] = me;
      u->bytes[i] = by;
      return;
    }
  }
}
static long in_use(int dev) {
  Usage* u = usage(visible()[dev]);
  long s = 0;
  for (int i = 0; i < 64; i++) {
    int o = u->pid[i];
    if (o && !kill(o, 0)) s += u->bytes[i];
  }
  return s;
}

// ------------------------------------------------------------------ streams and events
struct Comm;
struct Part;
struct Ev {
  int dev = 0;
  bool timing = true;
  unsigned long recorded = 0, completed = 0;
  double time = 0;
};
struct NcclOp {
  std::vector<Part> parts;
  bool posted = false;
};
struct Op {
  enum Kind { KERNEL, COPY, SET, RECORD, WAIT, NCCL, HOST } kind;
  double submitted, dur;
  const char* name;
  void* dst;
  const void* src;
  size_t n;
  int value, copy;
  Ev* ev;
  unsigned long upto;
  std::shared_ptr<NcclOp> nccl;
  void (*fn)(void*);
  void* arg;
  unsigned corr;
  double start;
  std::shared_ptr<std::string> fill;
};
struct Stream {
  int dev;
  int id;
  double clock = 0;
  std::deque<Op> q;
  bool capturing = false;
  bool busy = false;
};
static std::recursive_mutex* M = new std::recursive_mutex;
static std::condition_variable_any* CV = new std::condition_variable_any;
static std::set<Stream*>* STREAMS = new std::set<Stream*>;
static Stream* DEFAULT[16];
static Stream* NCCL_BY_DEV[16];
static bool initialised = false, bad_fork = false;
static thread_local int device_ = 0;
static thread_local cudaError_t last_ = cudaSuccess;
static std::atomic<unsigned> CORR{1};
static std::map<const char*, std::pair<size_t, int>>* RANGES =
    new std::map<const char*, std::pair<size_t, int>>;  // device >= 0, pinned -1
static std::unordered_map<const void*, const char*>* KERNELS = new std::unordered_map<const void*, const char*>;
static double kernel_s() {
  static double v = atof(env("CUDA_STAND_IN_KERNEL_US", "5")) * 1e-6;
  return v;
}
static bool advance(Stream* s);
static bool nccl_ready(NcclOp& op, bool apply);
static void record_gpu(const Op& op, Stream* s, double start, double end, const char* name);

static void progress() {
  pthread_setname_np(pthread_self(), "cuda_stand_in");
  std::unique_lock<std::recursive_mutex> l(*M);
  for (;;) {
    bool any = false;
    std::vector<Stream*> all(STREAMS->begin(), STREAMS->end());
    for (auto* s : all)
      if (STREAMS->count(s) && !s->q.empty()) {
        any = true;
        advance(s);
      }
    if (any) {
      l.unlock();
      usleep(200);
      l.lock();
    } else
      CV->wait_for(l, std::chrono::milliseconds(50));
  }
}
static cudaError_t fail(cudaError_t e) {
  last_ = e;
  return e;
}
static cudaError_t ready() {  // what the first call of CUDA in a process does
  if (bad_fork) return fail(cudaErrorInitializationError);
  if (initialised) return cudaSuccess;
  std::lock_guard<std::recursive_mutex> l(*M);
  if (initialised) return cudaSuccess;
  if (visible().empty()) return fail(cudaErrorNoDevice);
  for (size_t d = 0; d < visible().size(); d++) {
    DEFAULT[d] = new Stream{(int)d, 7};
    STREAMS->insert(DEFAULT[d]);
  }
  initialised = true;
  logf_("init devices=%zu", visible().size());
  pthread_atfork(0, 0, [] { bad_fork = true; });
  std::thread(progress).detach();
  return cudaSuccess;
}
#define READY \
  if (cudaError_t e_ = ready()) return e_
static bool contexted[16];
static void context(int d) {
  if (!contexted[d]) {
    contexted[d] = true;
    account(d, 120l << 20);
    logf_("context on device %d", d);
  }
}
static Stream* stream_of(cudaStream_t s) {
  if (s == 0 || s == (cudaStream_t)1 || s == (cudaStream_t)2) {
    context(device_);
    return DEFAULT[device_];
  }
  return (Stream*)s;
}
static void submit(Stream* s, Op op) {
  std::unique_lock<std::recursive_mutex> l(*M);
  context(s->dev);
  if (s->capturing) return;
  op.submitted = now_s();
  op.start = -1;
  if (!op.corr) op.corr = CORR++;
  if (op.kind == Op::RECORD) ++op.ev->recorded;
  if (op.ev) op.upto = op.ev->recorded;
  s->q.push_back(op);
  CV->notify_all();
  // the caller must not hold M: other streams go on while the launch queue is full
  while (s->q.size() > 1024) {
    advance(s);
    if (s->q.size() > 1024) {
      l.unlock();
      usleep(100);
      l.lock();
    }
  }  // the launch queue is full
}
static bool advance(Stream* s) {  // executes what is due; true if the stream is empty
  if (s->busy) return false;
  while (!s->q.empty()) {
    Op& op = s->q.front();
    double now = now_s();
    if (op.start < 0) op.start = std::max(s->clock, op.submitted);
    switch (op.kind) {
      case Op::KERNEL:
      case Op::COPY:
      case Op::SET: {
        double end = op.start + op.dur;
        if (end > now) return false;
        if (op.kind == Op::COPY && op.n) memmove(op.dst, op.src, op.n);
        if (op.kind == Op::SET && op.n) memset(op.dst, op.value, op.n);
        if (op.fill)
          for (size_t i = 0, w = op.fill->size(); i < op.n; i++) memcpy((char*)op.dst + i * w, op.fill->data(), w);
        s->clock = end;
        record_gpu(op, s, op.start, end, op.name);
        break;
      }
      case Op::RECORD:
        op.ev->completed = op.upto;
        op.ev->time = s->clock = std::max(s->clock, op.submitted);
        break;
      case Op::WAIT:
        if (op.ev->completed < op.upto) return false;
        s->clock = std::max(s->clock, op.ev->time);
        break;
      case Op::NCCL: {
        if (!nccl_ready(*op.nccl, true)) return false;
        double end = std::max(now_s(), op.start + op.dur);
        s->clock = end;
        record_gpu(op, s, op.start, end, op.name);
        break;
      }
      case Op::HOST: {
        auto f = op.fn;
        auto a = op.arg;
        s->busy = true;
        M->unlock();
        f(a);
        M->lock();
        s->busy = false;
        s->clock = now_s();
        break;
      }
    }
    s->q.pop_front();
  }
  return true;
}
static void drain(Stream* s) {
  std::unique_lock<std::recursive_mutex> l(*M);
  while (!advance(s)) {
    l.unlock();
    usleep(50);
    l.lock();
  }
}
API cudaError_t cudaGetDeviceCount(int* n) {
  if (bad_fork) {
    *n = 0;
    return fail(cudaErrorInitializationError);
  }
  *n = visible().size();
  READY;
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaSetDevice(int d) {
  READY;
  if (d < 0 || d >= (int)visible().size()) return fail(cudaErrorInvalidDevice);
  device_ = d;
  context(d);
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  READY;
  *d = device_;
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  auto e = last_;
  last_ = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return last_; }
API const char* cudaGetErrorString(cudaError_t e) {
  switch ((int)e) {
    case 0:
      return "no error";
    case 2:
      return "out of memory";
    case 3:
      return "initialization error";
    case 100:
      return "no CUDA-capable device is detected";
    case 101:
      return "invalid device ordinal";
    case 600:
      return "device not ready";
    case 801:
      return "operation not supported";
    default:
      return "fake error";
  }
}
API const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorFake";
}
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  READY;
  if (d < 0 || d >= (int)visible().size()) return fail(cudaErrorInvalidDevice);
  auto& m = model();
  memset(p, 0, sizeof *p);
  strcpy(p->name, m.name);
  p->totalGlobalMem = m.memory;
  p->major = m.major;
  p->minor = m.minor;
  p->multiProcessorCount = m.sms;
  p->warpSize = 32;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin = 65536;
  p->l2CacheSize = 4 << 20;
  p->maxThreadsPerMultiProcessor = 1024;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->managedMemory = 1;
  p->maxBlocksPerMultiProcessor = 16;
  p->pciBusID = 4 + visible()[d];
  p->memoryBusWidth = 256;
  p->cooperativeLaunch = 1;
  std::string u = uuid_of(visible()[d]).substr(4);
  int k = 0;
  for (size_t i = 0; i + 1 < u.size() && k < 16; i++)
    if (u[i] != '-') {
      p->uuid.bytes[k++] = strtol(u.substr(i, 2).c_str(), 0, 16);
      i++;
    }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int d) {
  READY;
  auto& m = model();
  switch ((int)a) {
    case 1:
      *v = 1024;
      break;
    case 5:
      *v = 2147483647;
      break;
    case 8:
      *v = 49152;
      break;
    case 10:
      *v = 32;
      break;
    case 12:
      *v = 65536;
      break;
    case 16:
      *v = m.sms;
      break;
    case 39:
      *v = 1024;
      break;
    case 75:
      *v = m.major;
      break;
    case 76:
      *v = m.minor;
      break;
    case 81:
      *v = 65536;
      break;
    case 97:
      *v = 65536;
      break;
    case 106:
      *v = 16;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* b, int n, int d) {
  snprintf(b, n, "0000:%02x:00.0", 4 + visible()[d]);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 0;
  return cudaSuccess;
}  // as on Kaggle
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* g) {
  *l = 0;
  *g = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  READY;
  std::vector<Stream*> all;
  {
    std::lock_guard<std::recursive_mutex> l(*M);
    for (auto* s : *STREAMS)
      if (s->dev == device_) all.push_back(s);
  }
  for (auto* s : all) drain(s);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  READY;
  *t = model().memory;
  *f = *t - in_use(device_);
  return cudaSuccess;
}
static cudaError_t allocate(void** p, size_t n, int dev) {
  size_t r = (n + 511) & ~size_t(511);
  if (!r) r = 512;
  if (dev >= 0) {
    context(dev);
    if (in_use(dev) + (long)r > (long)model().memory || r > model().memory) return fail(cudaErrorMemoryAllocation);
  }
  void* m = mmap(0, r, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  std::lock_guard<std::recursive_mutex> l(*M);
  (*RANGES)[(char*)m] = {r, dev};
  if (dev >= 0) account(dev, r);
  *p = m;
  logf_("alloc %zu dev %d", r, dev);
  return cudaSuccess;
}
static cudaError_t release(void* p) {
  if (!p) return cudaSuccess;
  std::lock_guard<std::recursive_mutex> l(*M);
  auto it = RANGES->find((char*)p);
  if (it == RANGES->end()) return fail(cudaErrorInvalidValue);
  if (it->second.second >= 0) account(it->second.second, -(long)it->second.first);
  munmap(p, it->second.first);
  RANGES->erase(it);
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** p, size_t n) {
  READY;
  return allocate(p, n, device_);
}
API cudaError_t cudaFree(void* p) {
  READY;
  if (p) cudaDeviceSynchronize();
  return release(p);
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  READY;
  return allocate(p, n, device_);
}
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  READY;
  return allocate(p, n, -1);
}
API cudaError_t cudaFreeHost(void* p) { return release(p); }
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  READY;
  std::lock_guard<std::recursive_mutex> l(*M);
  (*RANGES)[(char*)p] = {n, -1};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::recursive_mutex> l(*M);
  RANGES->erase((char*)p);
  return cudaSuccess;
}
static int place(const void* p) {  // device, -1 pinned, -2 pageable
  std::lock_guard<std::recursive_mutex> l(*M);
  auto it = RANGES->upper_bound((char*)p);
  if (it == RANGES->begin()) return -2;
  --it;
  return (char*)p < it->first + it->second.first ? it->second.second : -2;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  READY;
  int w = place(p);
  memset(a, 0, sizeof *a);
  a->type = w >= 0 ? cudaMemoryTypeDevice : w == -1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = w >= 0 ? w : 0;
  a->devicePointer = a->hostPointer = (void*)p;
  return cudaSuccess;
}
static unsigned api_record(const char* what, int cbid);
static cudaError_t copy(void* d, const void* s, size_t n, cudaStream_t st, bool sync) {
  READY;
  int from = place(s), to = place(d);
  Stream* q = stream_of(st);
  double dur = 4e-6 + n / 12e9;
  const char* kind = from >= 0 ? (to >= 0 ? "DtoD" : "DtoH") : to >= 0 ? "HtoD" : "HtoH";
  int code = from >= 0 ? (to >= 0 ? 8 : 2) : to >= 0 ? 1 : 9;
  Op op{};
  op.kind = Op::COPY;
  op.dur = dur;
  op.name = kind;
  op.dst = d;
  op.src = s;
  op.n = n;
  op.copy = code;
  op.corr = api_record("cudaMemcpyAsync", 41);
  if (from == -2 && to >= 0) {  // pageable to device: staged before the call returns
    void* t = malloc(n);
    memcpy(t, s, n);
    op.src = t;
    submit(q, op);
    Op h{};
    h.kind = Op::HOST;
    h.fn = free;
    h.arg = t;
    submit(q, h);
    if (sync) drain(q);
    return cudaSuccess;
  }
  submit(q, op);
  if (sync || to == -2) drain(q);  // device to pageable: returns when it is complete
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  return copy(d, s, n, st, false);
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return copy(d, s, n, st, false);
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) { return copy(d, s, n, 0, true); }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t st) {
  READY;
  Op op{};
  op.kind = Op::SET;
  op.dur = 3e-6;
  op.name = "Memset";
  op.dst = d;
  op.value = v;
  op.n = n;
  op.corr = api_record("cudaMemsetAsync", 51);
  submit(stream_of(st), op);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* d, int v, size_t n) {
  auto e = cudaMemsetAsync(d, v, n, 0);
  if (!e) drain(stream_of(0));
  return e;
}
static int next_stream = 13;
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  READY;
  std::lock_guard<std::recursive_mutex> l(*M);
  auto* n = new Stream{device_, next_stream++};
  STREAMS->insert(n);
  *s = (cudaStream_t)n;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) {
  drain((Stream*)s);
  std::lock_guard<std::recursive_mutex> l(*M);
  STREAMS->erase((Stream*)s);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  READY;
  std::lock_guard<std::recursive_mutex> l(*M);
  return advance(stream_of(s)) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  READY;
  api_record("cudaStreamSynchronize", 131);
  drain(stream_of(s));
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* st) {
  READY;
  *st = stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* st, unsigned long long* id,
                                         cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e,
                                         size_t* n) {
  READY;
  bool c = stream_of(s)->capturing;
  *st = c ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = c ? 1 : 0;
  if (g) *g = (cudaGraph_t)16;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  READY;
  stream_of(s)->capturing = true;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  stream_of(s)->capturing = false;
  *g = (cudaGraph_t)16;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  *e = (cudaGraphExec_t)32;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t s) {
  READY;
  Op op{};
  op.kind = Op::KERNEL;
  op.dur = 50e-6;
  op.name = "graph";
  submit(stream_of(s), op);
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
  READY;
  auto* n = new Ev;
  n->dev = device_;
  n->timing = !(f & cudaEventDisableTiming);
  *e = (cudaEvent_t)n;
  logf_("event");
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }  // it may still be referred to by a stream
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  READY;
  auto* ev = (Ev*)e;
  Stream* st = stream_of(s);
  if (ev->dev != st->dev) return fail(cudaErrorInvalidResourceHandle);
  Op op{};
  op.kind = Op::RECORD;
  op.ev = ev;
  submit(st, op);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static bool event_done(Ev* e) {
  if (e->completed >= e->recorded) return true;
  for (auto* s : std::vector<Stream*>(STREAMS->begin(), STREAMS->end()))
    if (s->dev == e->dev) advance(s);
  return e->completed >= e->recorded;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  READY;
  std::lock_guard<std::recursive_mutex> l(*M);
  return event_done((Ev*)e) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  READY;
  std::unique_lock<std::recursive_mutex> l(*M);
  while (!event_done((Ev*)e)) {
    l.unlock();
    usleep(50);
    l.lock();
  }
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  READY;
  auto *x = (Ev*)a, *y = (Ev*)b;
  std::lock_guard<std::recursive_mutex> l(*M);
  if (!x->timing || !y->timing || !x->recorded || !y->recorded) return fail(cudaErrorInvalidResourceHandle);
  if (!event_done(x) || !event_done(y)) return cudaErrorNotReady;
  *ms = (y->time - x->time) * 1e3;
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  READY;
  auto* ev = (Ev*)e;
  if (!ev->recorded) return cudaSuccess;
  Op op{};
  op.kind = Op::WAIT;
  op.ev = ev;
  submit(stream_of(s), op);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* a) {
  READY;
  Op op{};
  op.kind = Op::HOST;
  op.fn = f;
  op.arg = a;
  submit(stream_of(s), op);
  return cudaSuccess;
}
// ---- kernels
API void** __cudaRegisterFatBinary(void*) {
  static void* h;
  return &h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                int*) {
  (*KERNELS)[host] = name;
}
struct Pushed {
  dim3 g, b;
  size_t m;
  cudaStream_t s;
};
static thread_local std::vector<Pushed>* pushed;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st* s) {
  if (!pushed) pushed = new std::vector<Pushed>;
  pushed->push_back({g, b, m, s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  auto p = pushed->back();
  pushed->pop_back();
  *g = p.g;
  *b = p.b;
  *m = p.m;
  *(cudaStream_t*)s = p.s;
  return cudaSuccess;
}
static std::atomic<unsigned long> launches{0};
// The only kernel that computes: filling a contiguous tensor with a number, so that zeros are zeros and ones are ones.
static size_t fill_width(const char* name) {
  const char* at = strstr(name, "vectorized_elementwise_kernel");
  at = at ? strstr(at, "FillFunctorI") : 0;
  if (!at) return 0;
  at += 12;
  return !strncmp(at, "N3c104Half", 10) || !strncmp(at, "N3c108BFloat", 12) || *at == 's' ? 2
         : *at == 'f' || *at == 'i'                                                       ? 4
         : *at == 'd' || *at == 'l'                                                       ? 8
         : *at == 'b' || *at == 'h' || *at == 'a'                                         ? 1
                                                                                          : 0;
}
static cudaError_t launch(const void* f, cudaStream_t s, void** args = 0) {
  READY;
  launches++;
  Op op{};
  op.kind = Op::KERNEL;
  op.dur = kernel_s();
  auto it = KERNELS->find(f);
  op.name = it == KERNELS->end() ? "kernel" : it->second;
  op.corr = api_record("cudaLaunchKernel", 211);
  if (size_t w = args ? fill_width(op.name) : 0) {
    op.n = *(int*)args[0];
    op.fill = std::make_shared<std::string>((char*)args[1], w);
    op.dst = *(void**)args[2];
  }
  submit(stream_of(s), op);
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** a, size_t, cudaStream_t s) {
  return launch(f, s, a);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  return launch(f, c->stream, a);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void** a, size_t, cudaStream_t s) {
  return launch((void*)k, s, a);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  READY;
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = model().major * 10 + model().minor;
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char* area = (char*)calloc(1, 1 << 20);
  *p = area;
  return cudaSuccess;
}
// ---- the driver, as far as torch asks for it
static CUresult cu_ok(...) { return CUDA_SUCCESS; }
static CUresult cu_no(...) { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult cu_error(CUresult, const char** s) {
  *s = "fake driver error";
  return CUDA_SUCCESS;
}
static CUresult cu_attribute(int* v, CUdevice_attribute, CUdevice) {
  *v = 0;
  return CUDA_SUCCESS;
}
static CUresult cu_device(CUdevice* d, int n) {
  *d = n;
  return CUDA_SUCCESS;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* n, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* r) {
  std::string s(n);
  logf_("driver entry %s", n);
  *f = s == "cuGetErrorString"       ? (void*)cu_error
       : s == "cuDeviceGetAttribute" ? (void*)cu_attribute
       : s == "cuDeviceGet"          ? (void*)cu_device
                                     : (void*)cu_no;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ------------------------------------------------------------------ CUPTI: what kineto reads
static CUpti_BuffersCallbackRequestFunc requested;
static CUpti_BuffersCallbackCompleteFunc completed_;
static CUpti_TimestampCallbackFunc stamp;
static bool enabled_kinds[128];
static std::deque<std::string>* NAMES = new std::deque<std::string>;
struct Corr {
  CUpti_ExternalCorrelationKind k;
  uint64_t id;
};
static thread_local std::vector<Corr>* corr_stack;
static uint64_t to_stamp(double t) {  // CLOCK_MONOTONIC seconds to the unit of kineto's time stamps
  if (!stamp) {
    timespec r;
    clock_gettime(CLOCK_REALTIME, &r);
    return (uint64_t)((r.tv_sec + r.tv_nsec * 1e-9 - now_s() + t) * 1e9);
  }
  static double m0 = 0;
  static uint64_t s0 = 0;
  static double rate = 0;
  double m = now_s();
  uint64_t s = stamp();
  if (!m0) {
    m0 = m;
    s0 = s;
    usleep(2000);
    m = now_s();
    s = stamp();
  }
  rate = (double)(s - s0) / (m - m0);
  return s - (int64_t)((m - t) * rate);
}
static uint8_t* buf;
static size_t buf_size, buf_used;
static void hand_over() {
  if (buf) {
    auto* b = buf;
    buf = 0;
    completed_(0, 0, b, buf_size, buf_used);
  }
}
template <class T>
static void keep(const T& r) {  // as CUPTI: a buffer is requested for the first record
  size_t need = (8 + sizeof r + 7) & ~7;
  if (buf && buf_used + need > buf_size) hand_over();
  if (!buf) {
    size_t most = 0;
    buf_used = 0;
    if (requested) requested(&buf, &buf_size, &most);
  }
  if (!buf) return;
  *(uint64_t*)(buf + buf_used) = sizeof r;
  memcpy(buf + buf_used + 8, &r, sizeof r);
  buf_used += need;
}
static unsigned api_record(const char*, int cbid) {
  unsigned c = CORR++;
  std::lock_guard<std::recursive_mutex> l(*M);
  if (enabled_kinds[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION] && corr_stack)
    for (auto& x : *corr_stack) {
      CUpti_ActivityExternalCorrelation r{};
      r.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
      r.externalKind = x.k;
      r.externalId = x.id;
      r.correlationId = c;
      keep(r);
    }
  if (enabled_kinds[CUPTI_ACTIVITY_KIND_RUNTIME]) {
    CUpti_ActivityAPI r{};
    r.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
    r.cbid = cbid;
    r.start = to_stamp(now_s() - 4e-6);
    r.end = to_stamp(now_s());
    r.processId = getpid();
    r.threadId = (uint32_t)pthread_self();
    r.correlationId = c;
    keep(r);
  }
  return c;
}
static void record_gpu(const Op& op, Stream* s, double start, double end, const char* name) {
  if (op.kind == Op::COPY && enabled_kinds[CUPTI_ACTIVITY_KIND_MEMCPY]) {
    CUpti_ActivityMemcpy6 r{};
    r.kind = CUPTI_ACTIVITY_KIND_MEMCPY;
    r.copyKind = op.copy;
    r.bytes = op.n;
    r.start = to_stamp(start);
    r.end = to_stamp(end);
    r.deviceId = s->dev;
    r.contextId = 1;
    r.streamId = s->id;
    r.correlationId = op.corr;
    r.srcKind = 2;
    r.dstKind = 3;
    keep(r);
  } else if (op.kind == Op::SET && enabled_kinds[CUPTI_ACTIVITY_KIND_MEMSET]) {
    CUpti_ActivityMemset4 r{};
    r.kind = CUPTI_ACTIVITY_KIND_MEMSET;
    r.bytes = op.n;
    r.start = to_stamp(start);
    r.end = to_stamp(end);
    r.deviceId = s->dev;
    r.contextId = 1;
    r.streamId = s->id;
    r.correlationId = op.corr;
    keep(r);
  } else if ((op.kind == Op::KERNEL || op.kind == Op::NCCL) && enabled_kinds[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL]) {
    CUpti_ActivityKernel10 r{};
    r.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    r.start = to_stamp(start);
    r.end = to_stamp(end);
    r.completed = r.end;
    r.deviceId = s->dev;
    r.contextId = 1;
    r.streamId = s->id;
    r.correlationId = op.corr;
    r.gridX = r.gridY = r.gridZ = r.blockX = r.blockY = r.blockZ = 1;
    r.registersPerThread = 32;
    NAMES->push_back(name ? name : "kernel");
    r.name = NAMES->back().c_str();
    keep(r);
  }
}
API CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc a,
                                               CUpti_BuffersCallbackCompleteFunc b) {
  requested = a;
  completed_ = b;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc f) {
  stamp = f;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityEnable(CUpti_ActivityKind k) {
  enabled_kinds[k] = true;
  logf_("cupti enable %d", k);
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityDisable(CUpti_ActivityKind k) {
  enabled_kinds[k] = false;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
API CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
API CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
API CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind k, uint64_t i) {
  if (!corr_stack) corr_stack = new std::vector<Corr>;
  corr_stack->push_back({k, i});
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind k, uint64_t* last) {
  if (corr_stack)
    for (size_t i = corr_stack->size(); i-- > 0;)
      if ((*corr_stack)[i].k == k) {
        if (last) *last = (*corr_stack)[i].id;
        corr_stack->erase(corr_stack->begin() + i);
        return CUPTI_SUCCESS;
      }
  return CUPTI_ERROR_QUEUE_EMPTY;
}
API CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::lock_guard<std::recursive_mutex> l(*M);
  for (auto* s : std::vector<Stream*>(STREAMS->begin(), STREAMS->end())) advance(s);
  logf_("cupti flush %zu", buf_used);
  hand_over();
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityGetNextRecord(uint8_t* b, size_t valid, CUpti_Activity** r) {
  uint8_t* at = *r ? (uint8_t*)*r - 8 + ((8 + *(uint64_t*)((uint8_t*)*r - 8) + 7) & ~7ull) : b;
  if (at >= b + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *r = (CUpti_Activity*)(at + 8);
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* n) {
  *n = 0;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
API CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* s, CUpti_CallbackFunc, void*) {
  *s = (CUpti_SubscriberHandle)8;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
API CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
API CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }
API CUptiResult cuptiGetVersion(uint32_t* v) {
  *v = 130000;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiGetResultString(CUptiResult, const char** s) {
  *s = "fake";
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t id, const char** s) {
  *s = id == 211   ? "cudaLaunchKernel"
       : id == 41  ? "cudaMemcpyAsync"
       : id == 51  ? "cudaMemsetAsync"
       : id == 131 ? "cudaStreamSynchronize"
                   : "cudaOther";
  return CUPTI_SUCCESS;
}

// ------------------------------------------------------------------ cuBLAS: every product is a kernel
static thread_local cudaStream_t blas_stream;
API int cublasCreate_v2(void** h) {
  *h = calloc(1, 64);
  return 0;
}
API int cublasSetStream_v2(void*, cudaStream_t s) {
  blas_stream = s;
  return 0;
}
API int cublasGetMathMode(void*, int* m) {
  *m = 0;
  return 0;
}
API int cublasGetPointerMode_v2(void*, int* m) {
  *m = 0;
  return 0;
}
API size_t cublasLtGetVersion() { return 130100; }
API int stand_in_product(const char* name) {
  if (ready()) return 1;
  launches++;
  Op op{};
  op.kind = Op::KERNEL;
  op.dur = 4 * kernel_s();
  op.name = name;
  op.corr = api_record("cudaLaunchKernel", 211);
  submit(stream_of(blas_stream), op);
  return 0;
}
API int cublasLtMatmulDescCreate(void** d, int, int) {
  *d = calloc(1, 512);
  return 0;
}
API int cublasLtMatrixLayoutCreate(void** d, int, uint64_t, uint64_t, int64_t) {
  *d = calloc(1, 512);
  return 0;
}
API int cublasLtMatmulPreferenceCreate(void** d) {
  *d = calloc(1, 512);
  return 0;
}
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* n) {
  *n = 1;
  return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
                       void*, void*, void*, const void*, void*, size_t, cudaStream_t s) {
  blas_stream = s;
  return stand_in_product("cublasLt_gemm");
}
API size_t cudnnGetVersion() { return 92000; }
API size_t cudnnGetCudartVersion() { return 13000; }
API int cudnnGetProperty(int k, int* v) {
  *v = k == 0 ? 9 : k == 1 ? 20 : 0;
  return 0;
}
API const char* cudnnGetErrorString(int) { return "fake cuDNN"; }

// ------------------------------------------------------------------ NCCL
enum Kind { ALLREDUCE, REDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, SEND, RECV };
static const char* KERNEL_NAMES[] = {"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                                     "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"};
#define MOST 16
struct Board {
  std::atomic<int> joined;
  std::atomic<int> bus[MOST];
  std::atomic<unsigned long> posted[MOST], done[MOST], finalized[MOST], split[MOST];
  std::atomic<unsigned long> sent[MOST][MOST], taken[MOST][MOST];
  std::atomic<int> color[MOST][64], key[MOST][64];
};
struct Comm {
  std::string id;
  int rank, n, dev;
  Board* b;
  unsigned long seq = 0, splits = 0, s_to[MOST] = {}, r_from[MOST] = {};
  bool aborted = false, blocking = true;
  ncclResult_t state = ncclSuccess;
};
struct Part {
  Kind kind;
  Comm* c;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;
  unsigned long seq;
  bool posted, done;
  cudaStream_t stream;
};
struct Head {
  int kind, type, op, peer;
  size_t count;
};
static size_t width(ncclDataType_t t) {
  switch ((int)t) {
    case 0:
    case 1:
    case 10:
    case 11:
      return 1;
    case 6:
    case 9:
      return 2;
    case 2:
    case 3:
    case 7:
      return 4;
    default:
      return 8;
  }
}
static std::string file_of(Comm* c, const std::string& what) { return std::string(env("CUDA_STAND_IN_FOLDER", "/dev/shm")) + "/nccl-" + c->id + "-" + what; }
static void put(const std::string& p, const Head& h, const void* d, size_t n) {
  std::string t = p + ".t";
  FILE* f = fopen(t.c_str(), "wb");
  if (!f) return;
  fwrite(&h, sizeof h, 1, f);
  if (n) fwrite(d, 1, n, f);
  fclose(f);
  rename(t.c_str(), p.c_str());
}
static bool get(const std::string& p, Head& h, std::string& d) {
  FILE* f = fopen(p.c_str(), "rb");
  if (!f) return false;
  bool ok = fread(&h, sizeof h, 1, f) == 1;
  char b[65536];
  size_t n;
  while ((n = fread(b, 1, sizeof b, f)) > 0) d.append(b, n);
  fclose(f);
  return ok;
}
static float half_to(unsigned short h, bool bf) {
  if (bf) {
    unsigned u = (unsigned)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
  int e = (h >> 10) & 31, m = h & 1023;
  float v = e == 0 ? ldexpf(m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexpf(m + 1024, e - 25);
  return h & 0x8000 ? -v : v;
}
static unsigned short to_half(float f, bool bf) {
  unsigned u;
  memcpy(&u, &f, 4);
  if (bf) return u >> 16;
  unsigned s = (u >> 16) & 0x8000;
  int e = ((u >> 23) & 255) - 112;
  if (e <= 0) return s;
  if (e >= 31) return s | 0x7c00;
  return s | (e << 10) | ((u >> 13) & 1023);
}
template <class T>
static void red(T* a, const T* b, size_t n, int op) {
  for (size_t i = 0; i < n; i++)
    a[i] = op == 1 ? a[i] * b[i] : op == 2 ? std::max(a[i], b[i]) : op == 3 ? std::min(a[i], b[i]) : T(a[i] + b[i]);
}
static void combine(char* a, const char* b, size_t n, int t, int op) {
  switch (t) {
    case 0:
      red((signed char*)a, (const signed char*)b, n, op);
      break;
    case 1:
      red((unsigned char*)a, (const unsigned char*)b, n, op);
      break;
    case 2:
      red((int*)a, (const int*)b, n, op);
      break;
    case 4:
      red((long*)a, (const long*)b, n, op);
      break;
    case 7:
      red((float*)a, (const float*)b, n, op);
      break;
    case 8:
      red((double*)a, (const double*)b, n, op);
      break;
    case 6:
    case 9:
      for (size_t i = 0; i < n; i++) {
        float x = half_to(((unsigned short*)a)[i], t == 9), y = half_to(((const unsigned short*)b)[i], t == 9);
        red(&x, &y, 1, op);
        ((unsigned short*)a)[i] = to_half(x, t == 9);
      }
      break;
  }
}
static void average(char* a, size_t n, int t, int by) {
  if (t == 7)
    for (size_t i = 0; i < n; i++) ((float*)a)[i] /= by;
  if (t == 6 || t == 9)
    for (size_t i = 0; i < n; i++) {
      auto* h = (unsigned short*)a;
      h[i] = to_half(half_to(h[i], t == 9) / by, t == 9);
    }
}
static bool part_ready(Part& p) {
  Comm* c = p.c;
  size_t w = width(p.type);
  if (p.done || c->aborted) return true;
  if (p.kind == SEND) {
    std::string f =
        file_of(c, "p" + std::to_string(c->rank) + "-" + std::to_string(p.peer) + "-" + std::to_string(p.seq));
    if (!p.posted) {
      put(f, {SEND, (int)p.type, 0, 0, p.count}, p.in, p.count * w);
      c->b->sent[c->rank][p.peer] = p.seq + 1;
      p.posted = true;
    }
    if (c->b->taken[c->rank][p.peer] <= p.seq) return false;
    unlink(f.c_str());
    p.done = true;
    return true;
  }
  if (p.kind == RECV) {
    if (c->b->sent[p.peer][c->rank] <= p.seq) return false;
    Head h;
    std::string d;
    if (!get(file_of(c, "p" + std::to_string(p.peer) + "-" + std::to_string(c->rank) + "-" + std::to_string(p.seq)), h,
             d))
      return false;
    if (h.count != p.count) return false;  // never ends, as in NCCL
    memcpy(p.out, d.data(), d.size());
    c->b->taken[p.peer][c->rank] = p.seq + 1;
    p.done = true;
    return true;
  }
  int n = c->n;
  size_t in = p.kind == REDUCESCATTER || p.kind == ALLTOALL ? p.count * n : p.count;
  auto name = [&](int r) { return file_of(c, "c" + std::to_string(p.seq) + "-" + std::to_string(r)); };
  if (!p.posted) {
    bool sends = p.kind != BROADCAST || c->rank == p.peer;
    put(name(c->rank), {p.kind, (int)p.type, (int)p.op, p.peer, p.count}, p.in, sends ? in * w : 0);
    if (c->b->posted[c->rank] < p.seq + 1) c->b->posted[c->rank] = p.seq + 1;
    p.posted = true;
  }
  for (int r = 0; r < n; r++)
    if (c->b->posted[r] <= p.seq) return false;
  std::vector<std::string> d(n);
  for (int r = 0; r < n; r++) {
    Head h;
    if (!get(name(r), h, d[r])) return false;
    if (h.kind != p.kind || h.count != p.count || h.type != (int)p.type) return false;
  }  // a mismatch never ends
  size_t bytes = p.count * w;
  std::string all;
  switch (p.kind) {
    case ALLREDUCE:
    case REDUCE:
    case REDUCESCATTER: {
      std::string s = d[0];
      for (int r = 1; r < n; r++) combine(&s[0], d[r].data(), s.size() / w, p.type, p.op);
      if (p.op == 4) average(&s[0], s.size() / w, p.type, n);
      if (p.kind == REDUCESCATTER)
        memcpy(p.out, s.data() + bytes * c->rank, bytes);
      else if (p.kind == ALLREDUCE || p.peer == c->rank)
        memcpy(p.out, s.data(), bytes);
      break;
    }
    case BROADCAST:
      if (bytes) memcpy(p.out, d[p.peer].data(), bytes);
      break;
    case ALLGATHER:
      for (int r = 0; r < n; r++) memcpy((char*)p.out + r * bytes, d[r].data(), bytes);
      break;
    case ALLTOALL:
      for (int r = 0; r < n; r++) memcpy((char*)p.out + r * bytes, d[r].data() + c->rank * bytes, bytes);
      break;
    default:
      break;
  }
  if (c->b->done[c->rank] < p.seq + 1) c->b->done[c->rank] = p.seq + 1;
  p.done = true;  // streams may be in another order
  if (p.seq >= 16) {
    bool over = true;
    for (int r = 0; r < n; r++) over &= c->b->done[r] >= p.seq;
    if (over) unlink(file_of(c, "c" + std::to_string(p.seq - 16) + "-" + std::to_string(c->rank)).c_str());
  }
  return true;
}
static bool nccl_ready(NcclOp& op, bool) {
  bool all = true;
  for (auto& p : op.parts) all &= part_ready(p);
  return all;
}
static thread_local int group_depth;
static thread_local std::vector<Part>* grouped;
static thread_local std::string* nccl_last;
static void submit_parts(std::vector<Part> parts) {
  std::map<std::pair<cudaStream_t, int>, std::vector<Part>> by;
  for (auto& p : parts) by[{p.stream, p.c->dev}].push_back(p);
  for (auto& [k, v] : by) {
    Op op{};
    op.kind = Op::NCCL;
    op.dur = 20e-6;
    op.name = KERNEL_NAMES[v[0].kind];
    op.nccl = std::make_shared<NcclOp>();
    op.nccl->parts = v;
    op.corr = api_record("cudaLaunchKernelExC", 211);
    Stream* s = k.first ? (Stream*)k.first : DEFAULT[k.second];
    submit(s, op);
  }
}
static ncclResult_t nccl(Part p) {
  if (ready()) return ncclUnhandledCudaError;
  if (p.c->aborted) return ncclInvalidUsage;
  std::unique_lock<std::recursive_mutex> l(*M);
  p.seq = p.kind == SEND ? p.c->s_to[p.peer]++ : p.kind == RECV ? p.c->r_from[p.peer]++ : p.c->seq++;
  p.posted = p.done = false;
  logf_("nccl %d count %zu rank %d of %d comm %s", p.kind, p.count, p.c->rank, p.c->n, p.c->id.c_str());
  if (group_depth) {
    if (!grouped) grouped = new std::vector<Part>;
    grouped->push_back(p);
    return ncclSuccess;
  }
  l.unlock();
  submit_parts({p});
  return ncclSuccess;
}
API ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0 && grouped) {
    auto g = *grouped;
    grouped->clear();
    submit_parts(g);
  }
  return ncclSuccess;
}
API ncclResult_t ncclAllReduce(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t r, ncclComm_t c,
                               cudaStream_t s) {
  return nccl({ALLREDUCE, (Comm*)c, i, o, n, t, r, 0, 0, false, false, s});
}
API ncclResult_t ncclReduce(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t r, int root, ncclComm_t c,
                            cudaStream_t s) {
  return nccl({REDUCE, (Comm*)c, i, o, n, t, r, root, 0, false, false, s});
}
API ncclResult_t ncclBroadcast(const void* i, void* o, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                               cudaStream_t s) {
  return nccl({BROADCAST, (Comm*)c, i, o, n, t, ncclSum, root, 0, false, false, s});
}
API ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return ncclBroadcast(b, b, n, t, root, c, s);
}
API ncclResult_t ncclAllGather(const void* i, void* o, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return nccl({ALLGATHER, (Comm*)c, i, o, n, t, ncclSum, 0, 0, false, false, s});
}
API ncclResult_t ncclReduceScatter(const void* i, void* o, size_t n, ncclDataType_t t, ncclRedOp_t r, ncclComm_t c,
                                   cudaStream_t s) {
  return nccl({REDUCESCATTER, (Comm*)c, i, o, n, t, r, 0, 0, false, false, s});
}
API ncclResult_t ncclAlltoAll(const void* i, void* o, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return nccl({ALLTOALL, (Comm*)c, i, o, n, t, ncclSum, 0, 0, false, false, s});
}
API ncclResult_t ncclSend(const void* i, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return nccl({SEND, (Comm*)c, i, 0, n, t, ncclSum, peer, 0, false, false, s});
}
API ncclResult_t ncclRecv(void* o, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return nccl({RECV, (Comm*)c, 0, o, n, t, ncclSum, peer, 0, false, false, s});
}
API ncclResult_t ncclGetVersion(int* v) {
  *v = 22907;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* u) {
  memset(u, 0, sizeof *u);
  static std::atomic<int> k{0};
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  snprintf(u->internal, 60, "%d-%lx-%d", getpid(), (long)(t.tv_sec * 1000000000l + t.tv_nsec), k++);
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t r) {
  return r == ncclInvalidUsage ? "invalid usage (run with NCCL_DEBUG=WARN for details)"
         : r                   ? "unhandled system error"
                               : "no error";
}
API const char* ncclGetLastError(ncclComm_t) { return nccl_last ? nccl_last->c_str() : ""; }
static ncclResult_t create(ncclComm_t* out, int n, const std::string& id, int rank, int dev, bool blocking, bool wait) {
  auto* c = new Comm;
  c->id = id;
  c->rank = rank;
  c->n = n;
  c->dev = dev;
  c->blocking = blocking;
  std::string p = file_of(c, "board");
  int f = open(p.c_str(), O_RDWR | O_CREAT, 0600);
  (void)!ftruncate(f, sizeof(Board));
  c->b = (Board*)mmap(0, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
  close(f);
  c->b->bus[rank] = 1 + visible()[dev];
  c->b->joined++;
  logf_("comm %s rank %d of %d dev %d blocking %d", id.c_str(), rank, n, dev, blocking);
  double began = now_s();
  while (wait && c->b->joined < n && now_s() - began < 600) usleep(500);
  if (wait)
    for (int r = 0; r < n; r++)
      for (int q = 0; q < r; q++)
        if (c->b->bus[r] == c->b->bus[q]) {
          if (!nccl_last) nccl_last = new std::string;
          *nccl_last = "Duplicate GPU detected : rank " + std::to_string(r) + " and rank " + std::to_string(q) +
                       " both on CUDA device " + std::to_string(3 + c->b->bus[r]) + "0";
          return ncclInvalidUsage;
        }
  account(dev, 80l << 20);
  *out = (ncclComm_t)c;
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId u, int rank, ncclConfig_t* cfg) {
  if (ready()) return ncclUnhandledCudaError;
  return create(c, n, u.internal, rank, device_, !cfg || cfg->blocking != 0, true);
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId u, int rank) {
  return ncclCommInitRankConfig(c, n, u, rank, 0);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId* u, ncclConfig_t* cfg) {
  return ncclCommInitRankConfig(c, n, u[0], rank, cfg);
}
API ncclResult_t ncclCommInitAll(ncclComm_t* c, int n, const int* devs) {
  if (ready()) return ncclUnhandledCudaError;
  ncclUniqueId u;
  ncclGetUniqueId(&u);
  for (int i = 0; i < n; i++) create(&c[i], n, u.internal, i, devs ? devs[i] : i, true, false);
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t k, int color, int key, ncclComm_t* out, ncclConfig_t* cfg) {
  auto* c = (Comm*)k;
  unsigned long s = c->splits++;
  c->b->color[c->rank][s % 64] = color;
  c->b->key[c->rank][s % 64] = key;
  c->b->split[c->rank] = s + 1;
  for (int r = 0; r < c->n; r++) {
    double t = now_s();
    while (c->b->split[r] <= s && now_s() - t < 600) usleep(500);
  }
  if (color < 0) {
    *out = 0;
    return ncclSuccess;
  }
  int rank = 0, n = 0;
  for (int r = 0; r < c->n; r++)
    if (c->b->color[r][s % 64] == color) {
      n++;
      int o = c->b->key[r][s % 64];
      if (o < key || (o == key && r < c->rank)) rank++;
    }
  return create(out, n, c->id + "s" + std::to_string(s) + "c" + std::to_string(color), rank, c->dev,
                !cfg || cfg->blocking != 0, true);
}
API ncclResult_t ncclCommCount(ncclComm_t c, int* n) {
  *n = ((Comm*)c)->n;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(ncclComm_t c, int* r) {
  *r = ((Comm*)c)->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* e) {
  *e = ((Comm*)c)->state;
  return ncclSuccess;
}
static void finalize(Comm* c) {  // waits for its own operations and for the other ranks
  logf_("finalize %s rank %d begins", c->id.c_str(), c->rank);
  c->b->finalized[c->rank] = 1;
  for (bool over = false; !over && !c->aborted; usleep(500)) {
    over = true;
    {
      std::lock_guard<std::recursive_mutex> l(*M);
      for (auto* s : *STREAMS)
        for (auto& o : s->q)
          if (o.kind == Op::NCCL)
            for (auto& p : o.nccl->parts)
              if (p.c == c && !p.done) over = false;
    }
    for (int r = 0; r < c->n; r++)
      if (!c->b->finalized[r]) over = false;
  }
  logf_("finalize %s rank %d over", c->id.c_str(), c->rank);
}
API ncclResult_t ncclCommFinalize(ncclComm_t k) {
  auto* c = (Comm*)k;
  if (c->blocking) {
    finalize(c);
    return ncclSuccess;
  }
  c->state = ncclInProgress;
  std::thread([c] {
    finalize(c);
    c->state = ncclSuccess;
  }).detach();
  return ncclInProgress;
}
static void sweep(Comm* c) {
  for (unsigned long q = c->seq > 40 ? c->seq - 40 : 0; q < c->seq; q++)
    unlink(file_of(c, "c" + std::to_string(q) + "-" + std::to_string(c->rank)).c_str());
  unlink(file_of(c, "board").c_str());
}
API ncclResult_t ncclCommDestroy(ncclComm_t k) {
  auto* c = (Comm*)k;
  if (!c->b->finalized[c->rank]) finalize(c);
  account(c->dev, -(80l << 20));
  sweep(c);
  return ncclSuccess;
}
API ncclResult_t ncclCommAbort(ncclComm_t k) {
  auto* c = (Comm*)k;
  logf_("abort %s rank %d", c->id.c_str(), c->rank);
  c->aborted = true;
  account(c->dev, -(80l << 20));
  sweep(c);
  return ncclSuccess;
}
API ncclResult_t ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
