// The machine: its GPUs, which of them a process sees, and the memory that processes use on them, as CUDA and NVML
// report it. It is described by environment variables that start with CUDA_STAND_IN_ (see machines.py).
#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

inline const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv((std::string("CUDA_STAND_IN_") + name).c_str());
  return value && *value ? value : otherwise;
}

// Bytes of memory: what NVML calls total, and what is left of it for CUDA.
struct Model {
  const char *key, *name;
  int major, minor, multiprocessors;
  size_t memory, usable;
  bool has_kernels;  // whether the CUDA build of torch has kernels for it
};
const Model MODELS[] = {{"t4", "Tesla T4", 7, 5, 40, 16106127360, 15843721216, true},
                        {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 85520809984, 85017493504, true},
                        {"p100", "Tesla P100-PCIE-16GB", 6, 0, 56, 17179869184, 17059545088, false}};
inline const Model& model() {
  for (const Model& known : MODELS)
    if (!strcmp(known.key, setting("GPU", "t4"))) return known;
  return MODELS[0];
}

// A GPU, or a MIG device of one (part >= 0).
struct Device {
  int gpu, part = -1;

  size_t share(size_t bytes) const { return part < 0 ? bytes : bytes / 7; }  // of a GPU's memory
  std::string uuid() const {
    char text[80];
    const char* form = part < 0 ? "GPU-%08x-1111-2222-3333-44444444444%d" : "MIG-%08x-5555-6666-7777-88888888888%d";
    snprintf(text, sizeof text, form, 0xfa4e0000 + gpu, part < 0 ? gpu : part);
    return text;
  }
  std::string name_of_file() const { return std::to_string(gpu) + (part < 0 ? "" : "-" + std::to_string(part)); }
};
const int MOST_GPUS = 16;
inline int gpus() { return atoi(setting("DEVICES", "2")); }
inline int parts() { return atoi(setting("MIG", "0")); }  // MIG devices per GPU

// The files through which processes of one machine see each other.
inline std::string shared_file(const std::string& name) {
  return std::string(setting("FOLDER", "/dev/shm")) + "/" + name;
}
template <class T>
T* map_shared(const std::string& name, bool create) {
  int file = open(shared_file(name).c_str(), O_RDWR | (create ? O_CREAT : 0), 0600);
  if (file < 0) return nullptr;
  if (create && ftruncate(file, sizeof(T))) {
  }  // mmap fails then
  void* at = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
}

// Bytes in use on one device, by process; those of processes that have ended do not count.
struct Usage {
  static const int MOST = 64;
  std::atomic<int> process[MOST];
  std::atomic<long> bytes[MOST];

  void add(long more) {
    int own = getpid();
    for (int slot = 0; slot < MOST; slot++)
      if (process[slot] == own) {
        bytes[slot] += more;
        return;
      }
    for (int slot = 0; slot < MOST; slot++) {
      int other = process[slot];
      if ((!other || kill(other, 0)) && process[slot].compare_exchange_strong(other, own)) {
        bytes[slot] = more;
        return;
      }
    }
  }
  long total() const {
    long sum = 0;
    for (int slot = 0; slot < MOST; slot++)
      if (process[slot] && !kill(process[slot], 0)) sum += bytes[slot];
    return sum;
  }
};
inline Usage* usage_of(const Device& device, bool create) {
  return map_shared<Usage>("memory-" + device.name_of_file(), create);
}
