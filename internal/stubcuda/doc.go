// Package stubcuda turns a list of driver function names into a stand-in libcuda.so.1: a shared
// library for x86-64 Linux that says "there is a driver, and it has no device".
//
// XLA can ask cuDNN for real execution plans on a machine without a GPU, but without a driver
// library cuDNN finds none ("No valid engine configs"). [Build] writes that library, ELF headers,
// symbol table, machine code and all, so that no compiler is needed and the same bytes come out
// everywhere. What the functions do:
//
//	cuInit                      succeeds
//	cuDriverGetVersion          13040, the version that goes with CUDA 13.4
//	cuDeviceGetCount            0
//	cuGetErrorName, -String     one fixed text, which names the stand-in
//	cuGetProcAddress, _v2       the address of the named function of the stand-in
//	all others                  return 100, CUDA_ERROR_NO_DEVICE
//
// The names are those that the CUDA plugin and the libraries in the wheels of cuDNN, cuBLAS, NVRTC
// and NVVM hold as text (names.txt, sorted; gathered with strings(1), kept where they have the
// form of a driver call). Result codes and the meaning of arguments follow NVIDIA's cuda.h.
//
// The library must never be loaded where a real driver exists; package plugin decides that.
package stubcuda
