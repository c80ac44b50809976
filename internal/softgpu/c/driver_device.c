// GPUs, their attributes and their primary contexts.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct gpu gpus[SG_MAX_GPUS];
static int count;

// visible gives the GPUs that CUDA_VISIBLE_DEVICES lets a process see, by their places on the bus;
// the list ends with the first that is not there. NVML sees all.
static int visible(int places[]) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int all = sg_gpus(), n = 0;
  if (!list) {
    for (; n < all; n++) places[n] = n;
    return n;
  }
  while (n < SG_MAX_GPUS) {
    char *end;
    long place = strtol(list, &end, 10);
    if (end == list || place < 0 || place >= all) break;
    places[n++] = (int)place;
    if (*end != ',') break;
    list = end + 1;
  }
  return n;
}

static void setup(void) {
  int places[SG_MAX_GPUS];
  count = visible(places);
  for (int i = 0; i < count; i++) {
    struct gpu *c = &gpus[i];
    c->ordinal = i;
    c->place = places[i];
    c->model = sg_model();
    c->memory = sg_memory();
    c->context.gpu = c;
    pthread_mutex_init(&c->lock, NULL);
  }
}

struct gpu *sg_gpu(CUdevice device) {
  pthread_once(&once, setup);
  return device >= 0 && device < count ? &gpus[device] : NULL;
}

// A thread has a stack of contexts; calls without one to work on fail.
static _Thread_local CUcontext current;
static _Thread_local CUcontext stack[16];
static _Thread_local int depth;

struct gpu *sg_current(void) { return current ? current->gpu : NULL; }

void sg_set_current(struct gpu *gpu) { current = gpu ? &gpu->context : NULL; }

// A GPU that has failed once stays failed: the error is sticky, and only a new process gets rid of
// it.
CUresult sg_error(const struct gpu *gpu) { return (CUresult)atomic_load(&gpu->error); }

#define DEVICE(device)                     \
  struct gpu *gpu = sg_gpu(device);     \
  if (!gpu) return CUDA_ERROR_INVALID_DEVICE

// ---- the driver and its devices

SG_EXPORT CUresult cuInit(unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  return sg_gpu(0) ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

SG_EXPORT CUresult cuDriverGetVersion(int *version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = SG_CUDA_VERSION;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetCount(int *n) {
  sg_gpu(0);
  *n = count;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  DEVICE(ordinal);
  *device = gpu->ordinal;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetName(char *text, int size, CUdevice device) {
  DEVICE(device);
  snprintf(text, (size_t)size, "%s", gpu->model->name);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  DEVICE(device);
  memset(uuid, 0, sizeof *uuid);
  memcpy(uuid->bytes, "softgpu", 7);
  int process = getpid();  // GPUs of two processes are different GPUs
  memcpy(uuid->bytes + 8, &process, sizeof process);
  uuid->bytes[15] = (char)gpu->place;
  return CUDA_SUCCESS;
}
SG_EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

SG_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  DEVICE(device);
  *bytes = gpu->memory;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
  DEVICE(device);
  snprintf(text, (size_t)size, "0000:%02X:00.0", SG_FIRST_BUS + gpu->place);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; sg_gpu(i); i++)
    if (gpus[i].place == (int)bus - SG_FIRST_BUS) {
      *device = i;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_DEVICE;
}

SG_EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  DEVICE(device);
  *major = gpu->model->major;
  *minor = gpu->model->minor;
  return CUDA_SUCCESS;
}

// attribute gives those that differ between models.
static bool attribute(const struct gpu *gpu, int which, int *value) {
  const struct sg_model *m = gpu->model;
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = SG_FIRST_BUS + gpu->place; return true;
    case 13: *value = m->clock; return true;
    case 16: *value = m->processors; return true;
    case 36: *value = m->memory_clock; return true;
    case 37: *value = m->bus; return true;
    case 38: *value = m->l2; return true;
    case 39: *value = m->threads; return true;
    case 75: *value = m->major; return true;
    case 76: *value = m->minor; return true;
    case 81: *value = m->shared; return true;
    case 97: *value = m->optin; return true;
    case 106: *value = m->blocks; return true;
  }
  return false;
}

// The attributes that are the same for all models; one that is not listed is 0, which means no.
static const struct { int which, value; } attributes[] = {
    {1, 1024},        // threads in a block
    {2, 1024}, {3, 1024}, {4, 64},           // block, by dimension
    {5, 0x7fffffff}, {6, 65535}, {7, 65535}, // grid, by dimension
    {8, 49152},       // shared memory of a block that asks for no more
    {9, 65536},       // constant memory
    {10, 32},         // threads of a warp
    {11, 0x7fffffff}, // pitch
    {12, 65536},      // registers of a block
    {14, 512},        // alignment of textures
    {15, 1},          // copies while kernels run
    {19, 1},          // host memory can be mapped
    {30, 512},        // alignment of surfaces
    {31, 1},          // several kernels at the same time
    {32, 1},          // ECC
    {40, 4},          // copy engines
    {41, 1},          // one address space with the host
    {51, 32},         // alignment of texture pitch
    {78, 1},          // priorities of streams
    {79, 1}, {80, 1}, // L1 caches
    {82, 65536},      // registers of an SM
    {83, 1},          // managed memory
    {87, 2},          // ratio of single to double precision
    {89, 1}, {90, 1}, // concurrent managed access, preemption
    {91, 1},          // registered host memory has one address
    {92, 1}, {93, 1}, {94, 1},               // memory operations of streams, first interface
    {95, 1},          // cooperative launch
    {98, 1}, {99, 1}, // remote writes, registration of host memory
    {102, 1},         // memory is created and mapped in two steps
    {103, 1},         // and may be exported as a file descriptor
    {108, 83886080}, {109, 134217728},       // persisting L2
    {111, 1024},      // shared memory that a block loses to the system
    {113, 1}, {114, 1},
    {115, 1},         // memory pools
    {119, 1},         // which may be exported as a file descriptor
    {120, 1},         // clusters
    {122, 1}, {123, 1},                      // memory operations of streams
    {126, 4},         // domains of memory ordering
    {127, 1},         // tensor maps
    {129, 1},         // function pointers
    {131, -1},        // no NUMA node of its own
    {134, 0},         // host's NUMA node
};

SG_EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  DEVICE(device);
  if (which < 1 || which > 200) return CUDA_ERROR_INVALID_VALUE;
  if (attribute(gpu, which, value)) return CUDA_SUCCESS;
  *value = 0;
  for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
    if (attributes[i].which == which) *value = attributes[i].value;
  return CUDA_SUCCESS;
}

// ---- peers: all GPUs of a process reach each other

SG_EXPORT CUresult cuDeviceCanAccessPeer(int *yes, CUdevice from, CUdevice to) {
  if (!sg_gpu(from) || !sg_gpu(to)) return CUDA_ERROR_INVALID_DEVICE;
  *yes = from != to;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute which, CUdevice from,
                                           CUdevice to) {
  if (!sg_gpu(from) || !sg_gpu(to) || from == to) return CUDA_ERROR_INVALID_DEVICE;
  *value = which != CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK;
  return CUDA_SUCCESS;
}

// Access is given once; asking twice is an error of its own, which callers must expect.
SG_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  static atomic_bool enabled[SG_MAX_GPUS][SG_MAX_GPUS];
  struct gpu *gpu = sg_current();
  if (!gpu || !peer) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  if (peer->gpu == gpu) return CUDA_ERROR_INVALID_DEVICE;
  bool before = atomic_exchange(&enabled[gpu->ordinal][peer->gpu->ordinal], true);
  return before ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

// ---- contexts

SG_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  DEVICE(device);
  atomic_fetch_add(&gpu->context.retained, 1);
  *context = &gpu->context;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  DEVICE(device);
  if (atomic_load(&gpu->context.retained) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  atomic_fetch_sub(&gpu->context.retained, 1);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  DEVICE(device);
  gpu->context.flags = flags;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  DEVICE(device);
  *flags = gpu->context.flags;
  *active = atomic_load(&gpu->context.retained) > 0;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (depth == sizeof stack / sizeof *stack) sg_fail("a stack of more than 16 contexts");
  stack[depth++] = current;
  current = context;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = current;
  current = depth ? stack[--depth] : NULL;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->gpu->ordinal;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxGetFlags(unsigned *flags) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *flags = current->flags;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
  (void)context;
  *version = SG_CUDA_VERSION;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

// Waits for everything that was queued on the GPU before the call, and reports what failed.
SG_EXPORT CUresult cuCtxSynchronize(void) {
  struct gpu *gpu = sg_current();
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  sg_finish_gpu(gpu);
  return sg_error(gpu);
}

// ---- names of errors

static const struct { CUresult result; const char *name, *text; } errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "not initialized"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no GPU"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "no such GPU"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "not a module"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "no context, or a wrong one"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "memory lost bits"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "not PTX"},
    {CUDA_ERROR_NVLINK_UNCORRECTABLE, "CUDA_ERROR_NVLINK_UNCORRECTABLE", "a link lost bits"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "no such object, or of another GPU"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "no such name"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "not done yet"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel used a wrong address"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many registers or too much shared memory"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "the peer can be reached already"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "pinned already"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "not pinned by registering"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "not while a stream captures"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "the capture failed before"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "two captures would merge"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the stream did not begin the capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "a stream of the capture was not joined"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "a capture would wait for work outside of it"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "the event was recorded in a capture"},
    {CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph has another form"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

SG_EXPORT CUresult cuGetErrorName(CUresult result, const char **text) {
  *text = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].result == result) *text = errors[i].name;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SG_EXPORT CUresult cuGetErrorString(CUresult result, const char **text) {
  *text = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].result == result) *text = errors[i].text;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
