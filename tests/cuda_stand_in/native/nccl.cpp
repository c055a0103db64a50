// NCCL: what a rank sends lies in a file until every other rank has read it. The calls of one group are one operation
// on their stream: they go on side by side. A call that another rank does not match never ends, as in NCCL.
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "stand_in.hpp"

namespace {
const int MOST = MOST_GPUS;                // ranks
const int SPLITS = 64;                     // of a communicator that are remembered
const double LONGEST_WAIT = 600;           // seconds that a rank waits for others to join
const long COMMUNICATOR_BYTES = 80 << 20;  // of device memory
const double SECONDS = 20e-6;              // that a call takes at least
const unsigned long KEPT = 16;             // calls whose files exist: ranks may execute a few calls in another order

// What the ranks of a communicator know of each other: how many calls each has posted and finished, and so on.
struct Board {
  std::atomic<int> joined, device[MOST];
  std::atomic<unsigned long> posted[MOST], finished[MOST], left[MOST], split[MOST];
  std::atomic<unsigned long> sent[MOST][MOST], taken[MOST][MOST];  // messages, by sender and receiver
  std::atomic<int> color[MOST][SPLITS], key[MOST][SPLITS];
};
struct Communicator {
  std::string id;
  int rank, ranks, device;
  bool blocking;
  Board* board;
  unsigned long collectives = 0, splits = 0, sent[MOST] = {}, received[MOST] = {};
  std::atomic<int> pending{0};  // calls on streams that have not ended
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> state{ncclSuccess};

  std::string file(const std::string& name) const { return shared_file("nccl-" + id + "-" + name); }
};
Communicator* of(ncclComm_t handle) { return (Communicator*)handle; }
std::string& last_error() {
  static thread_local std::string* text = new std::string;
  return *text;
}

// ---- what is sent

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };
const char* const KERNELS[] = {"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                               "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"};

// One call of one rank.
struct Call {
  Kind kind;
  Communicator* own;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t reduction;
  int peer;  // or the root
  cudaStream_t stream;
  unsigned long number = 0;
  bool posted = false, over = false, unmatched = false;
};
struct Header {
  int kind, type;
  size_t count;
};

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void post(const std::string& path, const Header& header, const void* data, size_t bytes) {
  std::string unfinished = path + ".part";
  FILE* file = fopen(unfinished.c_str(), "wb");
  if (!file) return;
  fwrite(&header, sizeof header, 1, file);
  if (bytes) fwrite(data, 1, bytes, file);
  fclose(file);
  rename(unfinished.c_str(), path.c_str());
}
bool read(const std::string& path, Call& call, std::string& data) {  // false if it does not match the call
  FILE* file = fopen(path.c_str(), "rb");
  if (!file) return false;
  Header header{};
  bool complete = fread(&header, sizeof header, 1, file) == 1;
  char part[65536];
  for (size_t bytes; (bytes = fread(part, 1, sizeof part, file)) > 0;) data.append(part, bytes);
  fclose(file);
  bool alike = call.kind == RECEIVE || (header.kind == call.kind && header.type == (int)call.type);
  call.unmatched = !(complete && alike && header.count == call.count);
  return !call.unmatched;
}

// ---- arithmetic

float from_half(unsigned short half, bool brain) {
  if (brain) {
    unsigned bits = (unsigned)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  int exponent = half >> 10 & 31, fraction = half & 1023;
  float value = exponent == 0    ? ldexpf(fraction, -24)
                : exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : ldexpf(fraction + 1024, exponent - 25);
  return half & 0x8000 ? -value : value;
}
unsigned short to_half(float value, bool brain) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  if (brain) return bits >> 16;
  unsigned sign = bits >> 16 & 0x8000;
  int exponent = (int)(bits >> 23 & 255) - 112;
  if (exponent <= 0) return sign;
  if (exponent >= 31) return sign | 0x7c00;
  return sign | exponent << 10 | (bits >> 13 & 1023);
}
template <class T>
T reduced(T first, T second, int reduction) {
  switch (reduction) {
    case ncclProd:
      return first * second;
    case ncclMax:
      return std::max(first, second);
    case ncclMin:
      return std::min(first, second);
    default:
      return first + second;
  }
}
template <class T>
void reduce_as(std::string& total, const std::string& more, int reduction) {
  T* to = (T*)&total[0];
  const T* from = (const T*)more.data();
  for (size_t at = 0; at < total.size() / sizeof(T); at++) to[at] = reduced<T>(to[at], from[at], reduction);
}
// Applies a function of two floats to halves.
template <class F>
void with_halves(std::string& total, const std::string& more, bool brain, F function) {
  auto* to = (unsigned short*)&total[0];
  auto* from = (const unsigned short*)more.data();
  for (size_t at = 0; at < total.size() / 2; at++)
    to[at] = to_half(function(from_half(to[at], brain), from_half(from[at], brain)), brain);
}
void reduce(std::string& total, const std::string& more, const Call& call) {
  int reduction = call.reduction;
  switch (call.type) {
    case ncclInt8:
      return reduce_as<signed char>(total, more, reduction);
    case ncclUint8:
      return reduce_as<unsigned char>(total, more, reduction);
    case ncclInt32:
      return reduce_as<int>(total, more, reduction);
    case ncclInt64:
      return reduce_as<long>(total, more, reduction);
    case ncclFloat32:
      return reduce_as<float>(total, more, reduction);
    case ncclFloat64:
      return reduce_as<double>(total, more, reduction);
    case ncclFloat16:
    case ncclBfloat16:
      return with_halves(total, more, call.type == ncclBfloat16,
                         [=](float first, float second) { return reduced(first, second, reduction); });
    default:
      return;
  }
}
void divide(std::string& total, const Call& call) {
  float ranks = call.own->ranks;
  if (call.type == ncclFloat32)
    for (size_t at = 0; at < total.size() / 4; at++) ((float*)&total[0])[at] /= ranks;
  if (call.type == ncclFloat16 || call.type == ncclBfloat16)
    with_halves(total, total, call.type == ncclBfloat16, [=](float first, float) { return first / ranks; });
}

// ---- one call goes on as far as the other ranks are; true at its end

bool sends(Call& call) {
  Communicator& own = *call.own;
  std::string path =
      own.file("p" + std::to_string(own.rank) + "-" + std::to_string(call.peer) + "-" + std::to_string(call.number));
  if (!call.posted) {
    post(path, {SEND, (int)call.type, call.count}, call.in, call.count * width(call.type));
    own.board->sent[own.rank][call.peer] = call.number + 1;
    call.posted = true;
  }
  if (own.board->taken[own.rank][call.peer] <= call.number) return false;
  unlink(path.c_str());
  return true;
}
bool receives(Call& call) {
  Communicator& own = *call.own;
  if (own.board->sent[call.peer][own.rank] <= call.number) return false;
  std::string data;
  if (!read(own.file("p" + std::to_string(call.peer) + "-" + std::to_string(own.rank) + "-" +
                     std::to_string(call.number)),
            call, data))
    return false;
  memcpy(call.out, data.data(), data.size());
  own.board->taken[call.peer][own.rank] = call.number + 1;
  return true;
}
bool exchanges(Call& call) {
  Communicator& own = *call.own;
  Board& board = *own.board;
  auto path = [&](unsigned long number, int rank) {
    return own.file("c" + std::to_string(number) + "-" + std::to_string(rank));
  };
  size_t bytes = call.count * width(call.type);
  if (!call.posted) {
    bool for_each = call.kind == REDUCE_SCATTER || call.kind == ALL_TO_ALL;
    bool has_data = call.kind != BROADCAST || own.rank == call.peer;
    Header header{call.kind, (int)call.type, call.count};
    post(path(call.number, own.rank), header, call.in, has_data ? bytes * (for_each ? own.ranks : 1) : 0);
    board.posted[own.rank] = std::max<unsigned long>(board.posted[own.rank], call.number + 1);
    call.posted = true;
  }
  for (int rank = 0; rank < own.ranks; rank++)
    if (board.posted[rank] <= call.number) return false;
  std::vector<std::string> data(own.ranks);
  for (int rank = 0; rank < own.ranks; rank++)
    if (!read(path(call.number, rank), call, data[rank])) return false;
  char* out = (char*)call.out;
  switch (call.kind) {
    case ALL_REDUCE:
    case REDUCE:
    case REDUCE_SCATTER: {
      std::string& total = data[0];
      for (int rank = 1; rank < own.ranks; rank++) reduce(total, data[rank], call);
      if (call.reduction == ncclAvg) divide(total, call);
      if (call.kind == REDUCE_SCATTER) memcpy(out, total.data() + bytes * own.rank, bytes);
      if (call.kind == ALL_REDUCE || (call.kind == REDUCE && call.peer == own.rank)) memcpy(out, total.data(), bytes);
      break;
    }
    case BROADCAST:
      if (bytes) memcpy(out, data[call.peer].data(), bytes);
      break;
    case ALL_GATHER:
      for (int rank = 0; rank < own.ranks; rank++) memcpy(out + rank * bytes, data[rank].data(), bytes);
      break;
    default:  // ALL_TO_ALL
      for (int rank = 0; rank < own.ranks; rank++)
        memcpy(out + rank * bytes, data[rank].data() + own.rank * bytes, bytes);
  }
  board.finished[own.rank] = std::max<unsigned long>(board.finished[own.rank], call.number + 1);
  bool all_passed = true;
  for (int rank = 0; rank < own.ranks; rank++) all_passed &= board.finished[rank] >= call.number;
  if (call.number >= KEPT && all_passed) unlink(path(call.number - KEPT, own.rank).c_str());
  return true;
}
bool goes_on(Call& call) {
  if (call.over || call.own->aborted) return true;
  if (call.unmatched) return false;
  call.over = call.kind == SEND ? sends(call) : call.kind == RECEIVE ? receives(call) : exchanges(call);
  return call.over;
}

// ---- groups of calls

thread_local int group_depth;
thread_local std::vector<Call>* group;

void submit_calls(const std::vector<Call>& calls) {
  int before = current_device;
  std::map<std::pair<cudaStream_t, int>, std::vector<Call>> by_stream;
  for (const Call& call : calls) by_stream[{call.stream, call.own->device}].push_back(call);
  for (auto& [place, own] : by_stream) {
    auto shared = std::make_shared<std::vector<Call>>(own);
    for (Call& call : *shared) call.own->pending++;
    Operation operation{Operation::COLLECTIVE, KERNELS[own[0].kind], SECONDS};
    operation.attempt = [shared] {
      bool over = true;
      for (Call& call : *shared) over &= goes_on(call);
      if (over)
        for (Call& call : *shared) call.own->pending--;
      return over;
    };
    operation.correlation = record_call(CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000);
    current_device = place.second;  // the default stream is that of the communicator's device
    submit(stream_of(place.first), operation);
  }
  current_device = before;
}
ncclResult_t call(Call made) {
  if (initialise()) return ncclUnhandledCudaError;
  Communicator& own = *made.own;
  if (own.aborted) return ncclInvalidUsage;
  {
    std::lock_guard<std::recursive_mutex> lock(guard);
    made.number = made.kind == SEND      ? own.sent[made.peer]++
                  : made.kind == RECEIVE ? own.received[made.peer]++
                                         : own.collectives++;
  }
  note("nccl kind %d count %zu rank %d of %d in %s", made.kind, made.count, own.rank, own.ranks, own.id.c_str());
  if (!group_depth) {
    submit_calls({made});
    return ncclSuccess;
  }
  if (!group) group = new std::vector<Call>;
  group->push_back(made);
  return ncclSuccess;
}
}  // namespace

API ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0 && group) {
    std::vector<Call> calls;
    calls.swap(*group);
    submit_calls(calls);
  }
  return ncclSuccess;
}
API ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                               ncclComm_t own, cudaStream_t stream) {
  return call({ALL_REDUCE, of(own), in, out, count, type, reduction, 0, stream});
}
API ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                            int root, ncclComm_t own, cudaStream_t stream) {
  return call({REDUCE, of(own), in, out, count, type, reduction, root, stream});
}
API ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t own,
                               cudaStream_t stream) {
  return call({BROADCAST, of(own), in, out, count, type, ncclSum, root, stream});
}
API ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t own,
                           cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, own, stream);
}
API ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t own,
                               cudaStream_t stream) {
  return call({ALL_GATHER, of(own), in, out, count, type, ncclSum, 0, stream});
}
API ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                                   ncclComm_t own, cudaStream_t stream) {
  return call({REDUCE_SCATTER, of(own), in, out, count, type, reduction, 0, stream});
}
API ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t own,
                              cudaStream_t stream) {
  return call({ALL_TO_ALL, of(own), in, out, count, type, ncclSum, 0, stream});
}
API ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t own,
                          cudaStream_t stream) {
  return call({SEND, of(own), in, nullptr, count, type, ncclSum, peer, stream});
}
API ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t own, cudaStream_t stream) {
  return call({RECEIVE, of(own), nullptr, out, count, type, ncclSum, peer, stream});
}

// ---- communicators

API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    default:
      return "remote process exited or there was a network error";
  }
}
API const char* ncclGetLastError(ncclComm_t) { return last_error().c_str(); }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> number{0};
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "%d-%lx-%d", getpid(), (long)(now() * 1e9), number++);
  return ncclSuccess;
}
static ncclResult_t join(ncclComm_t* made, int ranks, const std::string& id, int rank, int device, bool blocking,
                         bool wait) {
  if (*setting("NCCL_ERROR", "")) {
    last_error() = setting("NCCL_ERROR", "");
    return ncclSystemError;
  }
  auto* own = new Communicator{id, rank, ranks, device, blocking};
  own->board = map_shared<Board>("nccl-" + id + "-board", true);
  Board& board = *own->board;
  board.device[rank] = 1 + visible()[device].gpu;
  board.joined++;
  note("communicator %s rank %d of %d on device %d", id.c_str(), rank, ranks, device);
  for (double began = now(); wait && board.joined < ranks && now() - began < LONGEST_WAIT;) usleep(500);
  for (int second = 0; wait && second < ranks; second++)
    for (int first = 0; first < second; first++)
      if (board.device[first] == board.device[second]) {
        last_error() = "Duplicate GPU detected : rank " + std::to_string(second) + " and rank " +
                       std::to_string(first) + " both on CUDA device " + std::to_string(3 + board.device[first]) + "0";
        return ncclInvalidUsage;
      }
  use_memory(device, COMMUNICATOR_BYTES);
  *made = (ncclComm_t)own;
  return ncclSuccess;
}
static bool is_blocking(const ncclConfig_t* configuration) { return !configuration || configuration->blocking != 0; }
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t* configuration) {
  if (initialise()) return ncclUnhandledCudaError;
  return join(made, ranks, id.internal, rank, current_device, is_blocking(configuration), true);
}
API ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids,
                                          ncclConfig_t* configuration) {
  return ncclCommInitRankConfig(made, ranks, ids[0], rank, configuration);
}
API ncclResult_t ncclCommInitAll(ncclComm_t* made, int ranks, const int* devices) {
  if (initialise()) return ncclUnhandledCudaError;
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  for (int rank = 0; rank < ranks; rank++)
    join(&made[rank], ranks, id.internal, rank, devices ? devices[rank] : rank, true, false);
  return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* configuration) {
  Communicator& own = *of(handle);
  Board& board = *own.board;
  unsigned long number = own.splits++;
  int slot = number % SPLITS;
  board.color[own.rank][slot] = color;
  board.key[own.rank][slot] = key;
  board.split[own.rank] = number + 1;
  double began = now();
  for (int rank = 0; rank < own.ranks; rank++)
    while (board.split[rank] <= number && now() - began < LONGEST_WAIT) usleep(500);
  *made = nullptr;
  if (color < 0) return ncclSuccess;
  int rank_there = 0, ranks_there = 0;
  for (int rank = 0; rank < own.ranks; rank++) {
    if (board.color[rank][slot] != color) continue;
    ranks_there++;
    int other = board.key[rank][slot];
    rank_there += other < key || (other == key && rank < own.rank);
  }
  std::string id = own.id + "s" + std::to_string(number) + "c" + std::to_string(color);
  return join(made, ranks_there, id, rank_there, own.device, is_blocking(configuration), true);
}
API ncclResult_t ncclCommCount(ncclComm_t handle, int* ranks) {
  *ranks = of(handle)->ranks;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  *rank = of(handle)->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  *state = of(handle)->state;
  return ncclSuccess;
}
// Waits for the calls of this rank and for the other ranks.
static void leave(Communicator* own) {
  own->board->left[own->rank] = 1;
  auto all_left = [own] {
    for (int rank = 0; rank < own->ranks; rank++)
      if (!own->board->left[rank]) return false;
    return own->pending == 0;
  };
  while (!own->aborted && !all_left()) usleep(500);
}
static void remove(Communicator* own) {
  use_memory(own->device, -COMMUNICATOR_BYTES);
  unsigned long first = own->collectives > 3 * KEPT ? own->collectives - 3 * KEPT : 0;
  for (unsigned long number = first; number < own->collectives; number++)
    unlink(own->file("c" + std::to_string(number) + "-" + std::to_string(own->rank)).c_str());
  unlink(own->file("board").c_str());
}
// These three accept no communicator, as NCCL's do: torch aborts those that it has not made yet.
API ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  Communicator* own = of(handle);
  if (own->blocking) {
    leave(own);
    return ncclSuccess;
  }
  own->state = ncclInProgress;
  std::thread([own] {
    leave(own);
    own->state = ncclSuccess;
  }).detach();
  return ncclInProgress;
}
API ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  if (!of(handle)->board->left[of(handle)->rank]) leave(of(handle));
  remove(of(handle));
  return ncclSuccess;
}
API ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  note("abort of rank %d in %s", of(handle)->rank, of(handle)->id.c_str());
  of(handle)->aborted = true;
  remove(of(handle));
  return ncclSuccess;
}
API ncclResult_t ncclMemAlloc(void** made, size_t bytes) {
  return cudaMalloc(made, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
API ncclResult_t ncclMemFree(void* at) {
  cudaFree(at);
  return ncclSuccess;
}
