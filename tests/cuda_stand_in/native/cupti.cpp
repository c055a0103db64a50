// CUPTI: the records that torch's profiler reads, of calls and of what devices did.
#include <time.h>

#include <set>

#include "stand_in.hpp"

namespace {
CUpti_BuffersCallbackRequestFunc request_buffer;
CUpti_BuffersCallbackCompleteFunc buffer_is_complete;
CUpti_TimestampCallbackFunc timestamp;
bool enabled[CUPTI_ACTIVITY_KIND_COUNT];
struct Correlation {
  CUpti_ExternalCorrelationKind kind;
  uint64_t id;
};
thread_local std::vector<Correlation>* correlations;
uint8_t* buffer;
size_t buffer_size, buffer_used;

// The profiler's time stamp of a time in seconds.
uint64_t stamp(double time) {
  if (!timestamp) {
    timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    return (real.tv_sec + real.tv_nsec * 1e-9 - now() + time) * 1e9;
  }
  static double first_time = 0;
  static uint64_t first_stamp = 0;
  if (!first_stamp) {
    first_time = now();
    first_stamp = timestamp();
    usleep(2000);
  }
  double present = now();
  uint64_t present_stamp = timestamp();
  double rate = (present_stamp - first_stamp) / (present - first_time);
  return present_stamp - (int64_t)((present - time) * rate);
}

void hand_over() {
  if (!buffer) return;
  uint8_t* full = buffer;
  buffer = nullptr;
  buffer_is_complete(nullptr, 0, full, buffer_size, buffer_used);
}

// Each record is preceded by its size and begins at a multiple of 8 bytes.
size_t room_for(size_t record) { return (8 + record + 7) / 8 * 8; }
template <class T>
void keep(const T& record) {
  if (buffer && buffer_used + room_for(sizeof record) > buffer_size) hand_over();
  if (!buffer) {
    size_t most = 0;
    buffer_used = 0;
    if (request_buffer) request_buffer(&buffer, &buffer_size, &most);
    if (!buffer) return;
  }
  *(uint64_t*)(buffer + buffer_used) = sizeof record;
  memcpy(buffer + buffer_used + 8, &record, sizeof record);
  buffer_used += room_for(sizeof record);
}
template <class T>
T work_on(const Stream& stream, unsigned correlation, CUpti_ActivityKind kind, double start, double end) {
  T record{};
  record.kind = kind;
  record.start = stamp(start);
  record.end = stamp(end);
  record.deviceId = stream.device;
  record.contextId = 1;
  record.streamId = stream.number;
  record.correlationId = correlation;
  return record;
}
}  // namespace

unsigned record_call(CUpti_runtime_api_trace_cbid_enum call) {
  static std::atomic<unsigned> numbers{1};
  unsigned number = numbers++;
  std::lock_guard<std::recursive_mutex> lock(guard);
  if (enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION] && correlations)
    for (const Correlation& outer : *correlations) {
      CUpti_ActivityExternalCorrelation record{};
      record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
      record.externalKind = outer.kind;
      record.externalId = outer.id;
      record.correlationId = number;
      keep(record);
    }
  if (enabled[CUPTI_ACTIVITY_KIND_RUNTIME]) {
    CUpti_ActivityAPI record{};
    record.kind = CUPTI_ACTIVITY_KIND_RUNTIME;
    record.cbid = call;
    record.start = stamp(now() - 4e-6);
    record.end = stamp(now());
    record.processId = getpid();
    record.threadId = (uint32_t)pthread_self();
    record.correlationId = number;
    keep(record);
  }
  return number;
}

void record_work(const Operation& operation, const Stream& stream, double start, double end) {
  CUpti_ActivityKind kind = operation.kind == Operation::COPY  ? CUPTI_ACTIVITY_KIND_MEMCPY
                            : operation.kind == Operation::SET ? CUPTI_ACTIVITY_KIND_MEMSET
                                                               : CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  if (!enabled[kind]) return;
  if (kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    auto record = work_on<CUpti_ActivityMemcpy6>(stream, operation.correlation, kind, start, end);
    record.copyKind = operation.direction;
    record.bytes = operation.size;
    record.srcKind = CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    record.dstKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    keep(record);
  } else if (kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    auto record = work_on<CUpti_ActivityMemset4>(stream, operation.correlation, kind, start, end);
    record.bytes = operation.size;
    keep(record);
  } else {
    static auto& names = *new std::set<std::string>;  // a record refers to a name
    auto record = work_on<CUpti_ActivityKernel10>(stream, operation.correlation, kind, start, end);
    record.completed = record.end;
    record.gridX = record.gridY = record.gridZ = record.blockX = record.blockY = record.blockZ = 1;
    record.registersPerThread = 32;
    record.name = names.insert(operation.name).first->c_str();
    keep(record);
  }
}

API CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                               CUpti_BuffersCallbackCompleteFunc complete) {
  request_buffer = request;
  buffer_is_complete = complete;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
  timestamp = function;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  enabled[kind] = true;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  enabled[kind] = false;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  if (!correlations) correlations = new std::vector<Correlation>;
  correlations->push_back({kind, id});
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  for (size_t at = correlations ? correlations->size() : 0; at-- > 0;)
    if ((*correlations)[at].kind == kind) {
      if (last) *last = (*correlations)[at].id;
      correlations->erase(correlations->begin() + at);
      return CUPTI_SUCCESS;
    }
  return CUPTI_ERROR_QUEUE_EMPTY;
}
API CUptiResult cuptiActivityFlushAll(uint32_t) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  advance_all();
  hand_over();
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityGetNextRecord(uint8_t* records, size_t used, CUpti_Activity** record) {
  uint8_t* next = records;
  if (*record) {
    uint8_t* before = (uint8_t*)*record - 8;
    next = before + room_for(*(uint64_t*)before);
  }
  if (next >= records + used) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (CUpti_Activity*)(next + 8);
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  *subscriber = (CUpti_SubscriberHandle)8;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = 130000;
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "error of the stand-in";
  return CUPTI_SUCCESS;
}
API CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t call, const char** name) {
  switch (call) {
    case CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000:
      *name = "cudaLaunchKernel";
      break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020:
      *name = "cudaMemcpyAsync";
      break;
    case CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020:
      *name = "cudaMemsetAsync";
      break;
    default:
      *name = "cudaStreamSynchronize";
  }
  return CUPTI_SUCCESS;
}
