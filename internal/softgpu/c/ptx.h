// The interpreter of PTX, as the driver sees it.
#ifndef SOFTGPU_PTX_H
#define SOFTGPU_PTX_H

#include <stddef.h>
#include <stdint.h>

struct ptx_module;
struct ptx_kernel;

// ptx_load reads the text of a module and makes its global variables. On failure it gives NULL and
// an error that the caller frees.
struct ptx_module *ptx_load(const char *text, char **error);
void ptx_unload(struct ptx_module *module);

// ptx_spelling gives the nth spelling of an instruction that the module has, such as add.rn.f32, or
// NULL behind the last.
const char *ptx_spelling(const struct ptx_module *module, size_t n);

// ptx_kernel finds an entry, or NULL. The kernel belongs to its module.
struct ptx_kernel *ptx_kernel(struct ptx_module *module, const char *name);

// ptx_kernel_problem says why a kernel cannot be run: it names the instruction that is not known.
// NULL means that it can.
const char *ptx_kernel_problem(const struct ptx_kernel *kernel);

// Parameters in order, their sizes, and the bytes of shared memory that the kernel declares itself.
unsigned ptx_kernel_params(const struct ptx_kernel *kernel);
size_t ptx_kernel_param_bytes(const struct ptx_kernel *kernel, unsigned at);
size_t ptx_kernel_shared(const struct ptx_kernel *kernel);

// With a seed, the blocks of a grid and the warps of a block between barriers run in a random
// order, another for each launch of a kernel, and copies of cp.async happen at once or late.
// Without one (0) they run in order, and copies are late. Set it before the first launch.
extern uint64_t ptx_seed;

// ptx_launch runs all blocks of a grid and returns when they are done: 0, or another number and an
// error that the caller frees. args has the address of every parameter's value. Several threads may
// call it at the same time, for one kernel as well.
int ptx_launch(struct ptx_kernel *kernel, const unsigned grid[3], const unsigned block[3],
               size_t dynamic_shared, void **args, char **error);

// ptx_global gives the address and the size of a global variable, or NULL.
void *ptx_global(struct ptx_module *module, const char *name, size_t *bytes);

#endif
