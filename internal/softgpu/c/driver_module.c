// Modules and kernels. The ptxas that the tests give to XLA leaves the PTX of a module behind its
// cubin (see toolkit.go); what a kernel computes comes from there. A kernel without PTX, or with an
// instruction that the interpreter does not know, ends the process when it is launched.
#define _GNU_SOURCE
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

// A cubin with PTX behind it has this mark in the unused bytes of its header.
#define MARK "dwptx"
enum { MARK_AT = EI_PAD };

struct variable {
  void *at;
  struct variable *next;
};

struct CUmod_st {
  struct gpu *gpu;
  struct ptx_module *ptx;  // NULL: there is no PTX
  struct CUfunc_st *functions;
  struct variable *variables;  // those that were asked for
  pthread_mutex_t lock;
};

struct CUfunc_st {
  struct CUfunc_st *next;
  CUmodule module;
  struct ptx_kernel *kernel;  // NULL: there is no PTX
  int attributes[CU_FUNC_ATTRIBUTE_MAX];
  char name[];
};

// elf_size is the length of an ELF file, which is given by its address alone.
static size_t elf_size(const char *image) {
  const Elf64_Ehdr *e = (const Elf64_Ehdr *)image;
  size_t size = e->e_shoff + (size_t)e->e_shnum * e->e_shentsize;
  size_t programs = e->e_phoff + (size_t)e->e_phnum * e->e_phentsize;
  if (programs > size) size = programs;
  const Elf64_Shdr *s = (const Elf64_Shdr *)(image + e->e_shoff);
  for (int i = 0; i < e->e_shnum; i++)
    if (s[i].sh_type != SHT_NOBITS && s[i].sh_offset + s[i].sh_size > size)
      size = s[i].sh_offset + s[i].sh_size;
  return size;
}

// find_ptx gives the PTX of an image, which the caller frees, or NULL. Behind a marked cubin come
// the mark, the length as 16 hexadecimal digits, and the text; ptxas may have padded the file.
static char *find_ptx(const char *image) {
  if (memcmp(image, ELFMAG, SELFMAG)) {
    bool text = image[0] == '.' || image[0] == '/' || image[0] == '\n';  // PTX, or a comment
    return text ? strdup(image) : NULL;
  }
  if (memcmp(image + MARK_AT, MARK, strlen(MARK))) return NULL;
  const char *tail = image + elf_size(image);
  for (int padding = 0; padding < 16; padding++, tail++) {
    if (memcmp(tail, MARK, strlen(MARK))) continue;
    char digits[17] = {0};
    memcpy(digits, tail + strlen(MARK), 16);
    return strndup(tail + strlen(MARK) + 16, strtoull(digits, NULL, 16));
  }
  sg_fail("a cubin whose PTX is missing behind it");
}

SG_EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  struct gpu *gpu = sg_current();
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  if (sg_error(gpu)) return sg_error(gpu);
  CUmodule m = calloc(1, sizeof *m);
  m->gpu = gpu;
  pthread_mutex_init(&m->lock, NULL);
  char *text = find_ptx(image), *error = NULL;
  if (text) {
    m->ptx = ptx_load(text, &error);
    free(text);
    if (!m->ptx) sg_fail("a module: %s", error ? error : "PTX that cannot be read");
    const char *spelling;
    for (size_t n = 0; (spelling = ptx_spelling(m->ptx, n)); n++) sg_log("ptx: %s", spelling);
  }
  *module = m;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count,
                                      int *options, void **values) {
  (void)count;
  (void)options;  // of a compiler that is not run
  (void)values;
  return cuModuleLoadData(module, image);
}

SG_EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
  return cuModuleLoadData(module, image);
}

// Unloading waits for the GPU: kernels of the module may still be queued.
SG_EXPORT CUresult cuModuleUnload(CUmodule m) {
  sg_finish_gpu(m->gpu);
  for (struct variable *v = m->variables, *next; v; v = next) {
    next = v->next;
    sg_memory_return(v->at);
    free(v);
  }
  for (struct CUfunc_st *f = m->functions, *next; f; f = next) {
    next = f->next;
    free(f);
  }
  if (m->ptx) ptx_unload(m->ptx);
  pthread_mutex_destroy(&m->lock);
  free(m);
  return CUDA_SUCCESS;
}

static void describe(struct CUfunc_st *f) {
  const struct sg_model *model = f->module->gpu->model;
  f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
  f->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
  f->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = 10 * model->major + model->minor;
  f->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 10 * model->major + model->minor;
  f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
  if (f->kernel)
    f->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES] = (int)ptx_kernel_shared(f->kernel);
}

SG_EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule m, const char *name) {
  struct ptx_kernel *kernel = m->ptx ? ptx_kernel(m->ptx, name) : NULL;
  if (m->ptx && !kernel) return CUDA_ERROR_NOT_FOUND;
  pthread_mutex_lock(&m->lock);
  struct CUfunc_st *f = m->functions;
  while (f && strcmp(f->name, name)) f = f->next;
  if (!f) {
    f = calloc(1, sizeof *f + strlen(name) + 1);
    strcpy(f->name, name);
    f->module = m;
    f->kernel = kernel;
    describe(f);
    f->next = m->functions;
    m->functions = f;
  }
  pthread_mutex_unlock(&m->lock);
  *function = f;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule m,
                                        const char *name) {
  size_t size;
  void *at = m->ptx ? ptx_global(m->ptx, name, &size) : NULL;
  if (!at) return CUDA_ERROR_NOT_FOUND;
  pthread_mutex_lock(&m->lock);
  struct variable *v = m->variables;
  while (v && v->at != at) v = v->next;
  if (!v) {
    v = malloc(sizeof *v);
    *v = (struct variable){at, m->variables};
    m->variables = v;
    sg_memory_lend(at, size, m->gpu);
  }
  pthread_mutex_unlock(&m->lock);
  if (pointer) *pointer = (uintptr_t)at;
  if (bytes) *bytes = size;
  return CUDA_SUCCESS;
}

// ---- functions

SG_EXPORT CUresult cuFuncGetName(const char **name, CUfunction f) {
  *name = f->name;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction f) {
  *module = f->module;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
  if ((unsigned)which >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  *value = f->attributes[which];
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
  if ((unsigned)which >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
      value + f->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES] > f->module->gpu->model->optin)
    return CUDA_ERROR_INVALID_VALUE;
  f->attributes[which] = value;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuFuncSetCacheConfig(CUfunction f, int config) {
  (void)f;
  (void)config;  // changes speed alone
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int size,
                                                               size_t shared) {
  const struct sg_model *m = f->module->gpu->model;
  if (size < 1) return CUDA_ERROR_INVALID_VALUE;
  int threads = (size + 31) / 32 * 32;
  size_t used = shared + (size_t)f->attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES] + 1024;
  int n = m->threads / threads, by_shared = (int)((size_t)m->shared / used);
  if (by_shared < n) n = by_shared;
  *blocks = n < m->blocks ? n : m->blocks;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f,
                                                                        int size, size_t shared,
                                                                        unsigned flags) {
  (void)flags;
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, size, shared);
}

// ---- launches

struct launch {
  atomic_int holders;
  CUfunction function;
  unsigned grid[3], block[3], shared;
  void **args;  // into values
  char *values;
};

struct launch *sg_launch_hold(struct launch *l) {
  atomic_fetch_add(&l->holders, 1);
  return l;
}

void sg_launch_drop(struct launch *l) {
  if (atomic_fetch_sub(&l->holders, 1) > 1) return;
  free(l->args);
  free(l->values);
  free(l);
}

struct gpu *sg_launch_gpu(const struct launch *l) { return l->function->module->gpu; }

static bool shape_fits(CUfunction f, const unsigned grid[3], const unsigned block[3]) {
  for (int i = 0; i < 3; i++)
    if (!grid[i] || !block[i]) return false;
  unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
  int most = f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK];
  return block[0] <= 1024 && block[1] <= 1024 && block[2] <= 64 &&
         threads <= (unsigned long long)most && grid[0] <= 0x7fffffff && grid[1] <= 65535 &&
         grid[2] <= 65535;
}

// The values of parameters are copied at the call: the caller's variables are free when it returns.
static void copy_values(struct launch *l, struct ptx_kernel *kernel, void **params) {
  unsigned n = ptx_kernel_params(kernel);
  size_t total = 0;
  for (unsigned i = 0; i < n; i++) total += (ptx_kernel_param_bytes(kernel, i) + 127) / 128 * 128;
  l->args = calloc(n + 1, sizeof *l->args);
  l->values = aligned_alloc(128, total + 128);
  char *at = l->values;
  for (unsigned i = 0; i < n; i++) {
    size_t bytes = ptx_kernel_param_bytes(kernel, i);
    memcpy(at, params[i], bytes);
    l->args[i] = at;
    at += (bytes + 127) / 128 * 128;
  }
}

CUresult sg_launch_new(struct launch **launch, CUfunction f, const unsigned grid[3],
                       const unsigned block[3], unsigned shared, void **params, void **extra) {
  if (!shape_fits(f, grid, block)) return CUDA_ERROR_INVALID_VALUE;
  if ((int)shared > f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES])
    return CUDA_ERROR_INVALID_VALUE;
  if (!f->kernel) sg_fail("kernel %s, which has no PTX", f->name);
  const char *problem = ptx_kernel_problem(f->kernel);
  if (problem) sg_fail("kernel %s: %s", f->name, problem);
  if (extra) sg_fail("kernel %s with its parameters in one buffer", f->name);
  if (!params && ptx_kernel_params(f->kernel)) return CUDA_ERROR_INVALID_VALUE;
  struct launch *l = calloc(1, sizeof *l);
  atomic_store(&l->holders, 1);
  l->function = f;
  memcpy(l->grid, grid, sizeof l->grid);
  memcpy(l->block, block, sizeof l->block);
  l->shared = shared;
  copy_values(l, f->kernel, params);
  *launch = l;
  return CUDA_SUCCESS;
}

// SOFTGPU_XID=gpu:launch:result makes a kernel fail, as a GPU that has fallen off the bus or lost
// bits does. The program learns of it later, from whatever call comes next, and from all others.
static bool fails(struct gpu *gpu) {
  long number = atomic_fetch_add(&gpu->launches, 1) + 1;
  const char *text = getenv("SOFTGPU_XID");
  long at_gpu, at_launch, result;
  if (!text || sscanf(text, "%ld:%ld:%ld", &at_gpu, &at_launch, &result) != 3) return false;
  if (at_gpu != gpu->place || at_launch != number) return false;
  sg_log("GPU %d: launch %ld fails with %ld", gpu->place, number, result);
  atomic_store(&gpu->error, (int)result);
  return true;
}

void sg_launch_run(struct launch *l, struct CUstream_st *stream) {
  if (fails(stream->gpu)) return;
  char *error = NULL;
  if (ptx_launch(l->function->kernel, l->grid, l->block, l->shared, l->args, &error))
    sg_fail("kernel %s: %s", l->function->name, error ? error : "it failed");
}

SG_EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                  unsigned block_x, unsigned block_y, unsigned block_z,
                                  unsigned shared, CUstream handle, void **params, void **extra) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  if (f->module->gpu != s->gpu) return CUDA_ERROR_INVALID_HANDLE;
  struct launch *l;
  result = sg_launch_new(&l, f, (unsigned[]){grid_x, grid_y, grid_z},
                         (unsigned[]){block_x, block_y, block_z}, shared, params, extra);
  return result ? result : sg_submit(s, (struct work){.kind = WORK_KERNEL, .launch = l});
}

// Of the attributes of a launch, a permission to overlap with the kernel before changes nothing
// that a correct program sees; a cluster of more than one block would.
SG_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params,
                                    void **extra) {
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttribute *a = &c->attrs[i];
    bool one = a->value[0] == 1 && a->value[1] == 1 && a->value[2] == 1;
    if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && one) continue;
    if (a->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) continue;
    sg_fail("kernel %s with launch attribute %d", f->name, a->id);
  }
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                        c->blockDimZ, c->sharedMemBytes, c->hStream, params, extra);
}
