// What the parts of the library share: streams with their operations, the profiler's records, and counts of calls.
#pragma once
#include <cuda_runtime_api.h>
#include <cupti.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "machine.hpp"

double now();                                                            // seconds, CLOCK_MONOTONIC
__attribute__((format(printf, 1, 2))) void note(const char* form, ...);  // a line in the file CUDA_STAND_IN_LOG
std::atomic<long>& calls_of(const char* function);                       // of this process

// The devices that this process sees, by CUDA's index, and the memory that it uses on them.
const std::vector<Device>& visible();
extern thread_local int current_device;
void use_memory(int device, long bytes);
long memory_in_use(int device);

// What the first call of CUDA in a process does; an error if it cannot.
cudaError_t initialise();
cudaError_t fail(cudaError_t error);  // keeps it for cudaGetLastError
#define COUNTED                                           \
  {                                                       \
    static std::atomic<long>& calls = calls_of(__func__); \
    calls++;                                              \
  }
#define READY \
  COUNTED     \
  if (cudaError_t error = initialise()) return error

struct Event {
  int device;
  bool timing;
  unsigned long recorded = 0, completed = 0;  // how often
  double time = 0;                            // of the last completion, seconds
};

struct Operation {
  enum Kind { KERNEL, COPY, SET, FILL, RECORD, WAIT, COLLECTIVE, HOST } kind;
  const char* name;
  double seconds = 0;  // how long it takes
  void* to = nullptr;
  const void* from = nullptr;
  size_t size = 0;  // bytes; of FILL, elements
  int value = 0;
  std::string element;  // of FILL
  CUpti_ActivityMemcpyKind direction{};
  std::shared_ptr<Event> event;
  unsigned long recording = 0;    // of the event
  std::function<bool()> attempt;  // of COLLECTIVE: goes on as far as other ranks are; true at its end
  std::function<void()> call;     // of HOST
  unsigned correlation = 0;       // with the call that submitted it
  double submitted = 0, start = -1;
};

struct Stream {
  int device, number;
  double clock = 0;  // when its last operation ended
  std::deque<Operation> queue;
  bool capturing = false, calling = false;
};
extern std::recursive_mutex& guard;  // of all streams, events and ranges of memory
Stream* stream_of(cudaStream_t handle);
void submit(Stream* stream, Operation operation);  // the caller must not hold the guard: a full queue is waited for
bool advance(Stream* stream);                      // executes what is due; whether the queue is empty then
void advance_all();
void drain(Stream* stream);  // waits until the queue is empty
double kernel_seconds();

// The profiler: a call of the API, whose number it returns, and work on a device.
unsigned record_call(CUpti_runtime_api_trace_cbid_enum call);
void record_work(const Operation& operation, const Stream& stream, double start, double end);
