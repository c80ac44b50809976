// How programs find the driver's functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "driver.h"

// A name without a suffix means the newest form that the version of CUDA has which the caller
// gives; since is the version that brought the form which is played. An older caller gets the older
// form, a stub. Names that are not listed have one form.
static const struct { const char *name, *means; int since; } newest[] = {
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000},
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2", 11000},
    {"cuDevicePrimaryCtxSetFlags", "cuDevicePrimaryCtxSetFlags_v2", 11000},
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020},
    {"cuEventDestroy", "cuEventDestroy_v2", 4000},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuGraphAddKernelNode", "cuGraphAddKernelNode_v2", 12000},
    {"cuGraphAddNode", "cuGraphAddNode_v2", 12030},
    {"cuGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2", 12000},
    {"cuGraphExecUpdate", "cuGraphExecUpdate_v2", 12000},
    {"cuGraphInstantiate", "cuGraphInstantiateWithFlags", 11000},
    {"cuGraphNodeGetDependencies", "cuGraphNodeGetDependencies_v2", 12030},
    {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000},
    {"cuMemAlloc", "cuMemAlloc_v2", 3020},
    {"cuMemAllocHost", "cuMemAllocHost_v2", 3020},
    {"cuMemFree", "cuMemFree_v2", 3020},
    {"cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020},
    {"cuMemHostGetDevicePointer", "cuMemHostGetDevicePointer_v2", 3020},
    {"cuMemHostRegister", "cuMemHostRegister_v2", 6050},
    {"cuMemcpyDtoD", "cuMemcpyDtoD_v2", 3020},
    {"cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", 3020},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020},
    {"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", 3020},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3020},
    {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", 3020},
    {"cuMemsetD16", "cuMemsetD16_v2", 3020},
    {"cuMemsetD32", "cuMemsetD32_v2", 3020},
    {"cuMemsetD8", "cuMemsetD8_v2", 3020},
    {"cuModuleGetGlobal", "cuModuleGetGlobal_v2", 3020},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10010},
    {"cuStreamDestroy", "cuStreamDestroy_v2", 4000},
    {"cuStreamGetCaptureInfo", "cuStreamGetCaptureInfo_v3", 12030},
    {"cuStreamWriteValue32", "cuStreamWriteValue32_v2", 11070},
    {"cuStreamWriteValue64", "cuStreamWriteValue64_v2", 11070},
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
  sg_log("driver: looks up %s", name);
  for (size_t i = 0; i < sizeof newest / sizeof *newest; i++)
    if (!strcmp(newest[i].name, name) && version >= newest[i].since) name = newest[i].means;
  *function = *name ? dlsym(self(), name) : NULL;
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
