// libnvidia-ml.so.1: how many GPUs there are, where, and that their links are up. The CUDA plugin
// sees no GPU without it.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "nvml.h"

static int text(char *to, unsigned size, const char *from) {
  if (strlen(from) >= size) return 7;  // NVML_ERROR_INSUFFICIENT_SIZE
  strcpy(to, from);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlInit_v2(void) { return NVML_SUCCESS; }
SG_EXPORT int nvmlInitWithFlags(unsigned flags) { return flags ? NVML_INVALID_ARGUMENT : 0; }
SG_EXPORT int nvmlShutdown(void) { return NVML_SUCCESS; }

SG_EXPORT const char *nvmlErrorString(int result) {
  switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NOT_FOUND: return "Not Found";
  }
  return "Unknown Error";
}

SG_EXPORT int nvmlSystemGetDriverVersion(char *to, unsigned size) {
  return text(to, size, SG_DRIVER_VERSION);
}

SG_EXPORT int nvmlSystemGetNVMLVersion(char *to, unsigned size) {
  return text(to, size, "13." SG_DRIVER_VERSION);
}

SG_EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = SG_CUDA_VERSION;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)sg_gpus();
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *h) {
  if ((int)index >= sg_gpus()) return NVML_INVALID_ARGUMENT;
  *h = (handle)(intptr_t)(index + 1);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, handle *h) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x", &domain, &bus) != 2) return NVML_INVALID_ARGUMENT;
  if (bus < SG_FIRST_BUS || (int)bus - SG_FIRST_BUS >= sg_gpus()) return NVML_NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(bus - SG_FIRST_BUS, h);
}

SG_EXPORT int nvmlDeviceGetIndex(handle h, unsigned *index) {
  *index = (unsigned)ordinal(h);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetName(handle h, char *to, unsigned size) {
  (void)h;
  return text(to, size, sg_model()->name);
}

SG_EXPORT int nvmlDeviceGetUUID(handle h, char *to, unsigned size) {
  char id[64];
  snprintf(id, sizeof id, "GPU-736f6674-6770-7500-0000-%012d", ordinal(h));
  return text(to, size, id);
}

SG_EXPORT int nvmlDeviceGetCudaComputeCapability(handle h, int *major, int *minor) {
  (void)h;
  *major = sg_model()->major;
  *minor = sg_model()->minor;
  return NVML_SUCCESS;
}

// ---- links

static int number(unsigned *to, unsigned value) {
  *to = value;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetCurrPcieLinkGeneration(handle h, unsigned *generation) {
  (void)h;
  return number(generation, 5);
}

SG_EXPORT int nvmlDeviceGetMaxPcieLinkGeneration(handle h, unsigned *generation) {
  (void)h;
  return number(generation, 5);
}

SG_EXPORT int nvmlDeviceGetCurrPcieLinkWidth(handle h, unsigned *width) {
  (void)h;
  return number(width, 16);
}

SG_EXPORT int nvmlDeviceGetMaxPcieLinkWidth(handle h, unsigned *width) {
  (void)h;
  return number(width, 16);
}

SG_EXPORT int nvmlDeviceGetNvLinkState(handle h, unsigned link, unsigned *up) {
  (void)h;
  if ((int)link >= sg_model()->links) return NVML_INVALID_ARGUMENT;
  *up = 1;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetNvLinkCapability(handle h, unsigned link, int which, unsigned *value) {
  (void)h;
  (void)which;
  if ((int)link >= sg_model()->links) return NVML_INVALID_ARGUMENT;
  *value = 1;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetP2PStatus(handle from, handle to, int which, int *status) {
  (void)from;
  (void)to;
  (void)which;
  *status = 0;  // works
  return NVML_SUCCESS;
}

// GPUs whose processes have the same SOFTGPU_FABRIC are in one NVLink domain across hosts; without
// it a GPU says that it has no such fabric.
struct fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

SG_EXPORT int nvmlDeviceGetGpuFabricInfoV(handle h, struct fabric *f) {
  (void)h;
  const char *name = getenv("SOFTGPU_FABRIC");
  memset(f->cluster, 0, sizeof f->cluster);
  if (name) memcpy(f->cluster, name, strnlen(name, sizeof f->cluster));
  f->status = 0;
  f->clique = 1;
  f->state = name && *name ? 3 : 0;  // completed, or not supported
  f->health = 0;
  return NVML_SUCCESS;
}
