// Preloaded (LD_PRELOAD) into a program: has one call of the CUDA driver fail for want of memory, whoever makes it.
//
// Whoever links libcuda gets these functions; CUDA's runtime, which is linked into MLX, asks dlsym for cuGetProcAddress and that for
// all others, so both are here too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

enum { kOutOfMemory = 2, kAllocation = 1, kGraph = 2 };

static atomic_int armed;     // which calls count
static atomic_long left;     // of them before the one that fails
static atomic_long counted;  // since faults_arm

void faults_arm(int kinds, long after) {
  atomic_store(&armed, 0);
  atomic_store(&counted, 0);
  atomic_store(&left, after);
  atomic_store(&armed, kinds);
}

// How many calls of these kinds there were, until the one that failed.
long faults_counted(void) {
  return atomic_load(&counted);
}

static int fails(int kind) {
  if (!(atomic_load(&armed) & kind)) {
    return 0;
  }
  atomic_fetch_add(&counted, 1);
  if (atomic_fetch_sub(&left, 1) != 0) {
    return 0;
  }
  atomic_store(&armed, 0);
  return 1;
}

static void* real_dlsym(void* handle, const char* name) {
  static void* (*real)(void*, const char*);
  if (!real) {
    real = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  }
  if (!real) {
    real = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  }
  return real(handle, name);
}

static void* driver(const char* name) {
  static void* handle;
  if (!handle) {
    handle = dlopen("libcuda.so.1", RTLD_NOW);
  }
  return real_dlsym(handle, name);
}

// Not cuMemAllocManaged: MLX asks for such memory where the host reads an array, in a function that may not throw, and ends the process.
typedef long (*Call)(long, long, long, long, long, long, long, long, long, long);

// A function of the driver, whose arguments, none of them floats, are passed on as they are.
#define WRAP(name, kind)                                                                                             \
  static Call real_##name;                                                                                           \
  long name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j) {                        \
    if (fails(kind)) {                                                                                               \
      return kOutOfMemory;                                                                                           \
    }                                                                                                                \
    if (!real_##name) {                                                                                              \
      real_##name = (Call)driver(#name);                                                                             \
    }                                                                                                                \
    return real_##name(a, b, c, d, e, f, g, h, i, j);                                                                \
  }

#define ALL(each)                          \
  each(cuMemAlloc_v2, kAllocation)         \
  each(cuMemAllocAsync, kAllocation)       \
  each(cuMemAllocFromPoolAsync, kAllocation) \
  each(cuMemHostAlloc, kAllocation)        \
  each(cuGraphInstantiate_v2, kGraph)      \
  each(cuGraphInstantiateWithFlags, kGraph) \
  each(cuGraphInstantiateWithParams, kGraph) \
  each(cuGraphLaunch, kGraph)

ALL(WRAP)

#define NAMED(name, kind) {#name, (void*)name, (void**)&real_##name},
static const struct {
  const char* name;
  void* wrapper;
  void** real;
} all[] = {ALL(NAMED)};

static void* wrapper_of(const char* name, void* real) {
  for (unsigned i = 0; i < sizeof all / sizeof *all; ++i) {
    const size_t length = strlen(name);
    // The runtime asks for the name without its version.
    if (strncmp(all[i].name, name, length) == 0 && (all[i].name[length] == 0 || strcmp(all[i].name + length, "_v2") == 0)) {
      if (real) {
        *all[i].real = real;
      }
      return all[i].wrapper;
    }
  }
  return 0;
}

static int (*real_get_v2)(const char*, void**, int, unsigned long, void*);

static int get_v2(const char* name, void** out, int version, unsigned long flags, void* status) {
  const int result = real_get_v2(name, out, version, flags, status);
  void* wrapper = result == 0 && *out ? wrapper_of(name, *out) : 0;
  if (wrapper) {
    *out = wrapper;
  }
  if (result == 0 && *out && strncmp(name, "cuGetProcAddress", 16) == 0) {
    *out = (void*)get_v2;
  }
  return result;
}

void* dlsym(void* handle, const char* name) {
  void* found = real_dlsym(handle, name);
  if (found && strcmp(name, "cuGetProcAddress_v2") == 0) {
    real_get_v2 = (int (*)(const char*, void**, int, unsigned long, void*))found;
    return (void*)get_v2;
  }
  void* wrapper = found && strncmp(name, "cu", 2) == 0 ? wrapper_of(name, found) : 0;
  return wrapper ? wrapper : found;
}
