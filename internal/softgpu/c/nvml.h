// What the parts of libnvidia-ml.so.1 share.
#ifndef SG_NVML_H
#define SG_NVML_H

#include <stdint.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6 };

// A handle is the GPU's number, counted from 1.
typedef struct device *handle;

static inline int ordinal(handle h) { return (int)(intptr_t)h - 1; }

#endif
