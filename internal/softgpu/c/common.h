// What every library of the software GPU shares: how it reads its settings and how it gives up.
#ifndef SOFTGPU_COMMON_H
#define SOFTGPU_COMMON_H

#include <stddef.h>
#include <stdint.h>

// The exit status of a process that asked the software GPU for something it does not play.
// A test sees it, with the name of what was asked for, and fails.
#define SG_UNPLAYED 86

// Exported functions; everything else in a library is hidden by the compiler's flags.
#define SG_EXPORT __attribute__((visibility("default")))

#define SG_FORMAT(at) __attribute__((format(printf, at, (at) + 1)))

// sg_fail says what is missing and ends the process with SG_UNPLAYED. There is no softer way: an
// error code would make the caller fall back to another path, and a test would pass without having
// tested anything.
_Noreturn void sg_fail(const char *format, ...) SG_FORMAT(1);

// sg_unplayed is what a generated stub calls.
_Noreturn void sg_unplayed(const char *library, const char *function);

// sg_log appends a line to the file that SOFTGPU_LOG names; without it nothing happens.
void sg_log(const char *format, ...) SG_FORMAT(1);

// sg_setting gives a number of the environment, or fallback. The value may be followed by other
// text: "3:500" is 3.
long long sg_setting(const char *name, long long fallback);

// A sg_model is a kind of GPU. All numbers are those of the real GPU, except that a test may give
// it less memory.
struct sg_model {
  const char *key;      // as package machine calls it
  const char *name;     // as the real driver and NVML call it
  int major, minor;     // compute capability
  int processors;       // SMs
  size_t memory;        // bytes
  int threads, blocks;  // per SM
  int shared, optin;    // bytes of shared memory per SM, and per block if it asks
  int l2;               // bytes of cache
  int clock, memory_clock;  // kHz
  int bus;              // bits
  int links;            // NVLinks; 0: none, GPUs reach each other over PCIe
};

// sg_model is the model that SOFTGPU_MODEL names; an unknown one ends the process.
const struct sg_model *sg_model(void);

// sg_gpus is the number of GPUs, from SOFTGPU_GPUS; 1 if it is not set.
int sg_gpus(void);

// sg_memory is the memory of each GPU in bytes, from SOFTGPU_MEMORY.
size_t sg_memory(void);

enum { SG_MAX_GPUS = 16 };

// Driver version as CUDA 13.4 counts it, and the text that NVML gives.
#define SG_CUDA_VERSION 13040
#define SG_DRIVER_VERSION "595.40.00"

// First bus of the GPUs: GPU i is at 0000:(1b+i):00.0.
#define SG_FIRST_BUS 0x1b

#endif
