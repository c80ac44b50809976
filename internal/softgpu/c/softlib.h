// What the software cuBLAS and NCCL share: the few driver functions that they call, and the small
// floating-point types. The prototypes are written from the public
// documentation of the CUDA driver interface; no header of NVIDIA is needed.
#ifndef SOFTGPU_SOFTLIB_H
#define SOFTGPU_SOFTLIB_H

#include <stdint.h>
#include <string.h>

#include "common.h"

// ---- the driver

typedef struct CUstream_st *soft_stream;

int cuLaunchHostFunc(soft_stream stream, void (*run)(void *), void *argument);
int cuStreamIsCapturing(soft_stream stream, int *status);
int cuCtxGetDevice(int *device);
int cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int cuMemFree_v2(unsigned long long address);

// soft_captures tells whether work on the stream goes into a graph, which can run it many times.
static inline int soft_captures(soft_stream stream) {
  int status = 0;
  return cuStreamIsCapturing(stream, &status) == 0 && status != 0;
}

// ---- numbers

static inline uint32_t soft_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float soft_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float soft_from_bf16(uint16_t value) { return soft_float((uint32_t)value << 16); }

// soft_to_bf16 rounds to nearest, ties to even; a NaN stays a NaN.
static inline uint16_t soft_to_bf16(float value) {
  uint32_t bits = soft_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float soft_from_f16(uint16_t value) {
  uint32_t sign = (uint32_t)(value & 0x8000) << 16;
  uint32_t exponent = (value >> 10) & 31, fraction = value & 1023;
  if (exponent == 31) return soft_float(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {  // subnormal: units of 2^-24
    return soft_float(sign | soft_bits((float)fraction * 5.9604644775390625e-8f));
  }
  return soft_float(sign | (exponent + 112) << 23 | fraction << 13);
}

// soft_to_f16 rounds to nearest, ties to even; what is too large becomes infinity.
static inline uint16_t soft_to_f16(float value) {
  uint32_t bits = soft_bits(value), sign = (bits >> 16) & 0x8000;
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00);  // 65536 and more
  if (rest < 0x38800000) {                                   // below 2^-14: subnormal
    // Adding 0.5 puts the units of 2^-24 at the end of the fraction, rounded by the hardware.
    return (uint16_t)(sign | (soft_bits(soft_float(rest) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
}

#endif
