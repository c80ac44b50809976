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
// # Processes
//
// With Options.Share memory of cuMemAlloc can be opened by another process (cuIpcGetMemHandle),
// while its owner lives. It ends a process that uses memory which its owner has freed.
// Events are not shared between processes.
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
// That nothing is used that nobody has written: device memory, shared memory, local memory and
// registers begin with all bits set, which is NaN in every float format. With Options.Order,
// blocks, and the warps of a block between barriers, run in a random order, so that a forgotten
// barrier shows in the numbers under some seed. A cp.async happens when it is waited for, and with
// Options.Order sometimes at once. A shfl from a lane outside the mask, and an aligned barrier that
// lanes of a warp come to by different instructions, end the launch; a shfl from a lane that has
// exited gives all bits set.
//
// # What it cannot prove
//
// Anything about time. What the real cuDNN, cuBLAS and NCCL do. Tensor cores, TMA, clusters. The
// rounding of the instructions that NVIDIA calls approximate. Quirks of drivers and of links.
//
// Races that need a finer order: a warp runs up to a barrier before the next one does, its lanes in
// step, and a block runs to its end before the next one. So a missing fence, a missing
// bar.warp.sync, and an access that should be atomic are not noticed, nor is a race whose every
// order gives the right numbers in a test, or whose wrong order no seed of it draws. Lanes that are
// at one barrier instruction in different rounds of a loop, and lanes that exit instead of coming
// to a barrier. A value that nobody has written where all bits set happens to be right, such as the
// start of an unsigned minimum. Memory beyond the first 16 MiB of a cuMemCreate is zeros, and
// memory that XLA's own allocator uses again holds what was there, as do the registers of all
// blocks but the first without a seed. Global variables of modules and pinned memory begin as
// zeros, as they do on a real host.
package softgpu
