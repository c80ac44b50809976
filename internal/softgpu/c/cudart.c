// libcudart.so.13 over the driver beside it: what the CUDA plugin and the software NCCL ask for.
// The real one needs tables of the driver that are not documented.
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "softcuda.h"

// The runtime numbers its errors as the driver does, as far as they meet here.
static _Thread_local int last;

static int keep(CUresult result) {
  if (result) last = (int)result;
  return (int)result;
}

// ---- devices

SG_EXPORT int cudaRuntimeGetVersion(int *version) {
  *version = SG_CUDA_VERSION;
  return 0;
}

SG_EXPORT int cudaDriverGetVersion(int *version) { return keep(cuDriverGetVersion(version)); }

SG_EXPORT int cudaGetDeviceCount(int *count) {
  CUresult result = cuInit(0);
  return keep(result ? result : cuDeviceGetCount(count));
}

// The runtime makes the primary context of a device current; device 0 is the default.
SG_EXPORT int cudaSetDevice(int device) {
  CUcontext context;
  CUresult result = cuDevicePrimaryCtxRetain(&context, device);
  return keep(result ? result : cuCtxSetCurrent(context));
}

SG_EXPORT int cudaGetDevice(int *device) {
  if (cuCtxGetDevice(device)) *device = 0;
  return 0;
}

SG_EXPORT int cudaDeviceGetAttribute(int *value, int which, int device) {
  return keep(cuDeviceGetAttribute(value, which, device));
}

SG_EXPORT int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  return keep(cuDeviceGetPCIBusId(text, size, device));
}

SG_EXPORT int cudaDeviceSynchronize(void) { return keep(cuCtxSynchronize()); }

// ---- errors

SG_EXPORT int cudaGetLastError(void) {
  int result = last;
  last = 0;
  return result;
}

SG_EXPORT int cudaPeekAtLastError(void) { return last; }

SG_EXPORT const char *cudaGetErrorString(int result) {
  const char *text;
  return cuGetErrorString((CUresult)result, &text) ? "unknown error" : text;
}

SG_EXPORT const char *cudaGetErrorName(int result) {
  const char *text;
  return cuGetErrorName((CUresult)result, &text) ? "cudaErrorUnknown" : text;
}

// ---- memory and streams

SG_EXPORT int cudaMalloc(void **pointer, size_t bytes) {
  return keep(cuMemAlloc_v2((CUdeviceptr *)pointer, bytes));
}

SG_EXPORT int cudaFree(void *pointer) { return keep(cuMemFree_v2((uintptr_t)pointer)); }

SG_EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind,
                              CUstream stream) {
  (void)kind;  // the driver knows what the addresses are
  return keep(cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, bytes, stream));
}

SG_EXPORT int cudaMemsetAsync(void *to, int value, size_t bytes, CUstream stream) {
  return keep(cuMemsetD8Async((uintptr_t)to, (unsigned char)value, bytes, stream));
}

SG_EXPORT int cudaStreamSynchronize(CUstream stream) { return keep(cuStreamSynchronize(stream)); }

SG_EXPORT int cudaStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return keep(cuStreamIsCapturing(stream, status));
}

// ---- kernels that are built into a library

// Constructors of the plugin register its own kernels. Their code is for real GPUs only, so what
// is kept is the name that a launch is refused with.
struct registered {
  const void *host;
  const char *name;
};
static struct registered *kernels;
static size_t count, room;

SG_EXPORT void **__cudaRegisterFatBinary(void *binary) {
  (void)binary;
  static void *handle;
  return &handle;
}

SG_EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
SG_EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

SG_EXPORT char __cudaInitModule(void **handle) {
  (void)handle;
  return 0;
}

SG_EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device,
                                      const char *name, int limit, void *a, void *b, void *c,
                                      void *d, int *e) {
  (void)handle, (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
  if (count == room) {
    room = room ? 2 * room : 1024;
    kernels = realloc(kernels, room * sizeof *kernels);
  }
  kernels[count++] = (struct registered){host, name};
}

SG_EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name,
                                 int external, size_t bytes, int constant, int global) {
  (void)handle, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant;
  (void)global;
}

static const char *name_of(const void *host) {
  for (size_t i = 0; i < count; i++)
    if (kernels[i].host == host) return kernels[i].name;
  return "without a name";
}

// A function of the plugin's own binary: it can be asked about, and not launched.
SG_EXPORT int cudaGetFuncBySymbol(CUfunction *function, const void *host) {
  static char image[] = "no PTX";
  CUmodule module;
  CUresult result = cuModuleLoadData(&module, image);
  return keep(result ? result : cuModuleGetFunction(function, module, name_of(host)));
}

struct dim {
  unsigned x, y, z;
};

SG_EXPORT int cudaLaunchKernel(const void *host, struct dim grid, struct dim block, void **args,
                               size_t shared, CUstream stream) {
  (void)grid, (void)block, (void)args, (void)shared, (void)stream;
  sg_fail("kernel %s, which is built into a library", name_of(host));
}
