// How programs find the driver's functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "driver.h"

// A name that is asked for without a version means the newest that the caller's version of CUDA
// knows; all callers here are of CUDA 13. Names that are not listed mean themselves.
static const struct { const char *name, *means; } newest[] = {
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2"},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2"},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2"},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2"},
    {"cuDevicePrimaryCtxSetFlags", "cuDevicePrimaryCtxSetFlags_v2"},
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2"},
    {"cuEventDestroy", "cuEventDestroy_v2"},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2"},
    {"cuGetProcAddress", "cuGetProcAddress_v2"},
    {"cuGraphAddKernelNode", "cuGraphAddKernelNode_v2"},
    {"cuGraphAddNode", "cuGraphAddNode_v2"},
    {"cuGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2"},
    {"cuGraphExecUpdate", "cuGraphExecUpdate_v2"},
    {"cuGraphInstantiate", "cuGraphInstantiateWithFlags"},
    {"cuGraphNodeGetDependencies", "cuGraphNodeGetDependencies_v2"},
    {"cuMemAlloc", "cuMemAlloc_v2"},
    {"cuMemAllocHost", "cuMemAllocHost_v2"},
    {"cuMemFree", "cuMemFree_v2"},
    {"cuMemGetAddressRange", "cuMemGetAddressRange_v2"},
    {"cuMemGetInfo", "cuMemGetInfo_v2"},
    {"cuMemHostGetDevicePointer", "cuMemHostGetDevicePointer_v2"},
    {"cuMemHostRegister", "cuMemHostRegister_v2"},
    {"cuMemcpyDtoD", "cuMemcpyDtoD_v2"},
    {"cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2"},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2"},
    {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"},
    {"cuMemsetD16", "cuMemsetD16_v2"},
    {"cuMemsetD32", "cuMemsetD32_v2"},
    {"cuMemsetD8", "cuMemsetD8_v2"},
    {"cuModuleGetGlobal", "cuModuleGetGlobal_v2"},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2"},
    {"cuStreamDestroy", "cuStreamDestroy_v2"},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3"},
    {"cuStreamWriteValue32", "cuStreamWriteValue32_v2"},
    {"cuStreamWriteValue64", "cuStreamWriteValue64_v2"},
};

static void *self(void) {
  Dl_info info;
  dladdr((void *)cuInit, &info);
  return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

SG_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version,
                                       uint64_t flags, CUdriverProcAddressQueryResult *status) {
  (void)flags;  // which kind of stream 0 is meant
  if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
  if (version < 12000) sg_fail("cuGetProcAddress for CUDA %d", version / 1000);
  for (size_t i = 0; i < sizeof newest / sizeof *newest; i++)
    if (!strcmp(newest[i].name, name)) name = newest[i].means;
  *function = dlsym(self(), name);
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// The tables behind this function are not documented; NVIDIA's own libraries need them, which is
// why those are played as well.
SG_EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  (void)id;
  *table = NULL;
  return CUDA_ERROR_NOT_FOUND;
}
