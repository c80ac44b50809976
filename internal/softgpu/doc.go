// Package softgpu turns C files into a software GPU: stand-ins for the NVIDIA driver, NVML, the
// CUDA runtime, cuBLAS and NCCL, on which the real CUDA plugin of XLA opens GPUs, compiles and
// computes in memory of the host. It is for tests, on hosts without a GPU.
//
// [Build] compiles the libraries with the system's C compiler, once for every state of the sources.
// [GPU.Env] is the environment in which a process finds them, and [Child] runs a test in such a
// process:
//
//	func TestCopies(t *testing.T) {
//		if !softgpu.Child(t, softgpu.Options{GPUs: 2}) {
//			return // the child has run the test
//		}
//		e, err := engine.Open(ctx, "cuda13", engine.Options{})
//
// # How kernels get their meaning
//
// XLA compiles a module to PTX and starts ptxas, which it finds in xla_gpu_cuda_data_dir. There the
// tests have a script that runs the real ptxas, so that its limits hold, and leaves the PTX behind
// the cubin. The driver finds it when the module is loaded, and interprets it at a launch.
//
// # What is not played
//
// The libraries export every name of the real ones. A function that is not played prints its name
// and ends the process with status [Unplayed]; so do a kernel without PTX, an instruction that the
// interpreter does not know, and a mode of a function that is not played. An error code would make
// XLA take another path, and a test would pass without having tested anything. The few functions
// that may say "not supported" are listed in names/refused.txt.
//
// # What it proves
//
// That a program uses the driver by its rules, or at least none of those that are played: what a
// stream orders and what it does not, what an event stands for, when the host may touch memory
// again, that a graph runs as it was launched, that a failed GPU stays failed. Options.Delay makes
// streams late in a random way, and reorders what has no order, so that a forgotten wait shows in
// the numbers. That the PTX which XLA emits computes what was meant, in IEEE arithmetic. That
// memory suffices, by the driver's account.
//
// # What it cannot prove
//
// Anything about time. What the real cuDNN, cuBLAS and NCCL do. Tensor cores, TMA, clusters. The
// rounding of the instructions that NVIDIA calls approximate. Quirks of drivers and of links.
package softgpu
