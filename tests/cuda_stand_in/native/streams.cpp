// Streams: operations are executed in order, by a thread that advances all of them, at the moments at which a device
// would have finished them.
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdarg>
#include <map>
#include <set>
#include <thread>

#include "stand_in.hpp"

namespace {
const size_t LONGEST_QUEUE = 1024;     // operations; a launch waits for room
const unsigned POLLING = 300;          // microseconds between looks at what is due
const long CONTEXT_BYTES = 120 << 20;  // of a process on a device
// Nothing of this is ever destroyed: threads use it until the process ends.
std::recursive_mutex& guard_ = *new std::recursive_mutex;
std::condition_variable_any& submitted = *new std::condition_variable_any;
std::set<Stream*>& streams = *new std::set<Stream*>;
std::set<Stream*>& busy = *new std::set<Stream*>;  // those whose queue is not empty
Stream* default_streams[MOST_GPUS];
bool has_context[MOST_GPUS];
bool initialised = false, forked_after_it = false;
int next_number = 13;  // of a stream; 7 is the default stream

void run() {
  pthread_setname_np(pthread_self(), "cuda-stand-in");
  std::unique_lock<std::recursive_mutex> lock(guard);
  for (;;) {
    if (busy.empty()) {
      submitted.wait_for(lock, std::chrono::milliseconds(50));
      continue;
    }
    advance_all();
    lock.unlock();
    usleep(POLLING);
    lock.lock();
  }
}

void make_context(int device) {
  if (has_context[device]) return;
  has_context[device] = true;
  use_memory(device, CONTEXT_BYTES);
  note("context on device %d", device);
}
}  // namespace

std::recursive_mutex& guard = guard_;
thread_local int current_device = 0;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

void note(const char* form, ...) {
  static const char* path = setting("LOG", "");
  FILE* file = *path ? fopen(path, "a") : nullptr;
  if (!file) return;
  char line[512];
  va_list values;
  va_start(values, form);
  vsnprintf(line, sizeof line, form, values);
  va_end(values);
  fprintf(file, "%d %s\n", getpid(), line);
  fclose(file);
}

std::atomic<long>& calls_of(const char* function) {
  static auto& known = *new std::map<std::string, std::atomic<long>>;
  std::lock_guard<std::recursive_mutex> lock(guard);
  return known[function];
}
API long stand_in_calls(const char* function) { return calls_of(function); }  // for tests

// CUDA_VISIBLE_DEVICES, read once as CUDA does: indices or beginnings of UUIDs, up to the first that names no device.
// Of MIG devices a process sees one.
const std::vector<Device>& visible() {
  static const std::vector<Device>& chosen = *[] {
    std::vector<Device> all;
    for (int gpu = 0; gpu < gpus(); gpu++)
      for (int part = parts() ? 0 : -1; part < parts(); part++) all.push_back({gpu, part});
    auto* found = new std::vector<Device>;
    const char* value = getenv("CUDA_VISIBLE_DEVICES");
    std::string rest = value ? value : "";
    if (!value) *found = all;
    while (!rest.empty()) {
      size_t comma = rest.find(',');
      std::string word = rest.substr(0, comma);
      rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
      while (!word.empty() && word[0] == ' ') word.erase(0, 1);
      int match = -1;
      for (size_t index = 0; index < all.size(); index++) {
        std::string uuid = all[index].uuid();
        if (word == std::to_string(index) || (word.size() > 4 && uuid.compare(0, word.size(), word) == 0))
          match = index;
      }
      if (match < 0) break;
      found->push_back(all[match]);
    }
    if (parts() && found->size() > 1) found->resize(1);
    return found;
  }();
  return chosen;
}

static Usage* usage(int device) {
  static Usage* known[MOST_GPUS];
  if (!known[device]) known[device] = usage_of(visible()[device], true);
  return known[device];
}
void use_memory(int device, long bytes) { usage(device)->add(bytes); }
long memory_in_use(int device) { return usage(device)->total(); }
double kernel_seconds() {
  static const double seconds = atof(setting("KERNEL_US", "5")) * 1e-6;
  return seconds;
}

cudaError_t initialise() {
  if (forked_after_it) return fail(cudaErrorInitializationError);
  if (initialised) return cudaSuccess;
  std::lock_guard<std::recursive_mutex> lock(guard);
  if (initialised) return cudaSuccess;
  int driver = atoi(setting("DRIVER", "13000"));
  if (driver < CUDART_VERSION / 1000 * 1000) return fail(cudaErrorInsufficientDriver);
  if (visible().empty()) return fail(cudaErrorNoDevice);
  for (size_t device = 0; device < visible().size(); device++)
    streams.insert(default_streams[device] = new Stream{(int)device, 7});
  initialised = true;
  note("initialised with %zu devices", visible().size());
  pthread_atfork(nullptr, nullptr, [] { forked_after_it = true; });
  std::thread(run).detach();
  return cudaSuccess;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (Stream*)handle;
  make_context(current_device);
  return default_streams[current_device];
}

void submit(Stream* stream, Operation operation) {
  static std::atomic<unsigned> correlations{1u << 30};
  std::unique_lock<std::recursive_mutex> lock(guard);
  make_context(stream->device);
  if (stream->capturing) return;
  operation.submitted = now();
  if (!operation.correlation) operation.correlation = correlations++;
  if (operation.kind == Operation::RECORD) operation.event->recorded++;
  if (operation.event) operation.recording = operation.event->recorded;
  stream->queue.push_back(std::move(operation));
  busy.insert(stream);
  submitted.notify_all();
  while (stream->queue.size() > LONGEST_QUEUE && !advance(stream)) {
    lock.unlock();
    usleep(100);
    lock.lock();
  }
}

bool advance(Stream* stream) {
  if (stream->calling) return false;
  while (!stream->queue.empty()) {
    Operation& next = stream->queue.front();
    if (next.start < 0) next.start = std::max(stream->clock, next.submitted);
    double end = next.start + next.seconds;
    switch (next.kind) {
      case Operation::KERNEL:
      case Operation::COPY:
      case Operation::SET:
      case Operation::FILL:
        if (end > now()) return false;
        if (next.kind == Operation::COPY) memmove(next.to, next.from, next.size);
        if (next.kind == Operation::SET) memset(next.to, next.value, next.size);
        if (next.kind == Operation::FILL)
          for (size_t at = 0, width = next.element.size(); at < next.size; at++)
            memcpy((char*)next.to + at * width, next.element.data(), width);
        stream->clock = end;
        record_work(next, *stream, next.start, end);
        break;
      case Operation::RECORD:
        stream->clock = std::max(stream->clock, next.submitted);
        next.event->completed = next.recording;
        next.event->time = stream->clock;
        break;
      case Operation::WAIT:
        if (next.event->completed < next.recording) return false;
        stream->clock = std::max(stream->clock, next.event->time);
        break;
      case Operation::COLLECTIVE:
        if (!next.attempt()) return false;
        stream->clock = std::max(now(), end);
        record_work(next, *stream, next.start, stream->clock);
        break;
      case Operation::HOST: {
        auto call = std::move(next.call);
        stream->calling = true;
        guard.unlock();
        call();
        guard.lock();
        stream->calling = false;
        stream->clock = now();
        break;
      }
    }
    stream->queue.pop_front();
  }
  busy.erase(stream);
  return true;
}

void advance_all() {
  std::lock_guard<std::recursive_mutex> lock(guard);
  for (Stream* stream : std::vector<Stream*>(busy.begin(), busy.end()))
    if (busy.count(stream)) advance(stream);
}

void drain(Stream* stream) {
  std::unique_lock<std::recursive_mutex> lock(guard);
  while (!advance(stream)) {
    advance_all();  // it may wait for another stream
    lock.unlock();
    usleep(100);
    lock.lock();
  }
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int) {
  READY;
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto* stream = new Stream{current_device, next_number++};
  streams.insert(stream);
  *made = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  drain((Stream*)handle);
  std::lock_guard<std::recursive_mutex> lock(guard);
  streams.erase((Stream*)handle);
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  READY;
  std::lock_guard<std::recursive_mutex> lock(guard);
  return advance(stream_of(handle)) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  READY;
  record_call(CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020);
  drain(stream_of(handle));
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  READY;
  std::vector<Stream*> own;
  {
    std::lock_guard<std::recursive_mutex> lock(guard);
    for (Stream* stream : streams)
      if (stream->device == current_device) own.push_back(stream);
  }
  for (Stream* stream : own) drain(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  READY;
  Operation call{Operation::HOST, "host function"};
  call.call = [=] { function(argument); };
  submit(stream_of(handle), call);
  return cudaSuccess;
}

// ---- events: a handle points to a shared pointer, because operations may refer to an event that was destroyed

static std::shared_ptr<Event>& event_of(cudaEvent_t handle) { return *(std::shared_ptr<Event>*)handle; }
static bool is_complete(const Event& event) {
  if (event.completed < event.recorded) advance_all();
  return event.completed >= event.recorded;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  READY;
  auto event = std::make_shared<Event>(Event{current_device, !(flags & cudaEventDisableTiming)});
  *made = (cudaEvent_t) new std::shared_ptr<Event>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  COUNTED;
  std::lock_guard<std::recursive_mutex> lock(guard);
  delete &event_of(handle);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  READY;
  Stream* stream = stream_of(stream_handle);
  Operation record{Operation::RECORD, "record"};
  record.event = event_of(handle);
  if (record.event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  submit(stream, record);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
  READY;
  Operation wait{Operation::WAIT, "wait"};
  wait.event = event_of(handle);
  if (wait.event->recorded) submit(stream_of(stream), wait);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  READY;
  std::lock_guard<std::recursive_mutex> lock(guard);
  return is_complete(*event_of(handle)) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  READY;
  auto event = event_of(handle);
  std::unique_lock<std::recursive_mutex> lock(guard);
  while (!is_complete(*event)) {
    lock.unlock();
    usleep(100);
    lock.lock();
  }
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  READY;
  auto start = event_of(from), end = event_of(to);
  std::lock_guard<std::recursive_mutex> lock(guard);
  if (!start->timing || !end->timing || !start->recorded || !end->recorded) return fail(cudaErrorInvalidResourceHandle);
  if (!is_complete(*start) || !is_complete(*end)) return cudaErrorNotReady;
  *milliseconds = (end->time - start->time) * 1e3;
  return cudaSuccess;
}

// ---- graphs: what is captured is not executed; a launch takes as long as ten kernels

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  READY;
  *status = stream_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                         size_t* nodes) {
  cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (id) *id = *status == cudaStreamCaptureStatusActive;
  if (graph) *graph = (cudaGraph_t)16;
  if (nodes) *nodes = 0;
  return error;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  READY;
  stream_of(stream)->capturing = true;
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  stream_of(stream)->capturing = false;
  *graph = (cudaGraph_t)16;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  *executable = (cudaGraphExec_t)32;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
  READY;
  submit(stream_of(stream), {Operation::KERNEL, "graph", 10 * kernel_seconds()});
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* nodes) {
  *nodes = 1;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
