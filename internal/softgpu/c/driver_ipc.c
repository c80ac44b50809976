// Memory of a GPU that another process opens. With SOFTGPU_SHARE every cuMemAlloc is a file of
// memory, and a handle says which file of which process: the other process opens it there, so its
// owner must live. A handle stands for a whole allocation, whatever pointer into it was given.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"

enum { MARK = 0x63706964 };

// What is in a handle. The file's inode tells a file from a later one with the same descriptor.
struct named {
  uint32_t mark, place;
  int32_t process, file;
  uint64_t inode, bytes;
};

bool sg_shared(void) { return sg_setting("SOFTGPU_SHARE", 0) != 0; }

void *sg_share(size_t bytes, int *file) {
  *file = memfd_create("softgpu shared", MFD_CLOEXEC);
  if (*file < 0 || ftruncate(*file, (off_t)bytes)) sg_fail("a host without memory files");
  sg_poison_file(*file, bytes);
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *file, 0);
  if (at != MAP_FAILED) return at;
  close(*file);
  return NULL;
}

// Who still uses memory that its owner has freed ends with a signal, as with memory of its own.
void sg_unshare(int file) {
  if (ftruncate(file, 0)) sg_fail("a file of memory that cannot be emptied");
  close(file);
}

SG_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
  struct gpu *gpu = sg_current();
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  if (sg_error(gpu)) return sg_error(gpu);
  struct block b;
  if (!handle || !sg_find(pointer, 1, &b) || b.kind != MEMORY_DEVICE || !b.owned)
    return CUDA_ERROR_INVALID_VALUE;
  if (!b.shared && !sg_shared()) sg_fail("a handle of memory without SOFTGPU_SHARE");
  if (!b.shared) return CUDA_ERROR_INVALID_VALUE;  // from a pool
  struct stat at;
  if (fstat(b.file, &at)) return CUDA_ERROR_INVALID_VALUE;
  struct named n = {MARK, (uint32_t)b.gpu->place, getpid(), b.file, at.st_ino, b.bytes};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &n, sizeof n);
  return CUDA_SUCCESS;
}

// ---- the side that opens

// An opened handle is mapped once, and counted.
struct opened {
  struct named named;
  uintptr_t start;
  int count;
  struct opened *next;
};

static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER;
static struct opened *opened;

// map maps the file that a handle names, or gives NULL if it is gone.
static void *map(const struct named *n) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", n->process, n->file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return NULL;
  struct stat at;
  void *start = MAP_FAILED;
  if (!fstat(file, &at) && at.st_ino == n->inode && (uint64_t)at.st_size == n->bytes)
    start = mmap(NULL, n->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  return start == MAP_FAILED ? NULL : start;
}

static CUresult open_named(CUdeviceptr *pointer, const struct named *n, struct gpu *gpu) {
  for (struct opened *o = opened; o; o = o->next)
    if (!memcmp(&o->named, n, sizeof *n)) {
      o->count++;
      *pointer = o->start;
      return CUDA_SUCCESS;
    }
  void *start = map(n);
  if (!start) return CUDA_ERROR_INVALID_VALUE;
  struct opened *o = malloc(sizeof *o);
  *o = (struct opened){*n, (uintptr_t)start, 1, opened};
  opened = o;
  sg_memory_lend(start, n->bytes, gpu);
  sg_log("GPU %d: %zu bytes of process %d opened", gpu->place, (size_t)n->bytes, n->process);
  *pointer = o->start;
  return CUDA_SUCCESS;
}

// A process does not open its own handles. Memory of another GPU than the context's needs the
// caller's word that access between GPUs may be turned on, which is the one flag there is.
SG_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle,
                                         unsigned flags) {
  struct gpu *gpu = sg_current(), *home = NULL;
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  if (sg_error(gpu)) return sg_error(gpu);
  struct named n;
  memcpy(&n, &handle, sizeof n);
  if (!pointer || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || n.mark != MARK)
    return CUDA_ERROR_INVALID_VALUE;
  if (n.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  for (int i = 0; sg_gpu(i); i++)
    if (sg_gpu(i)->place == (int)n.place) home = sg_gpu(i);
  if (!home) return CUDA_ERROR_INVALID_DEVICE;
  pthread_mutex_lock(&opened_lock);
  CUresult result = open_named(pointer, &n, home);
  pthread_mutex_unlock(&opened_lock);
  return result;
}

// The memory is unmapped when it was closed as often as it was opened. Work that still uses it ends
// the process.
SG_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&opened_lock);
  for (struct opened **at = &opened; *at; at = &(*at)->next) {
    struct opened *o = *at;
    if (o->start != pointer) continue;
    result = CUDA_SUCCESS;
    if (--o->count) break;
    *at = o->next;
    sg_memory_return((void *)o->start);
    munmap((void *)o->start, o->named.bytes);
    free(o);
    break;
  }
  pthread_mutex_unlock(&opened_lock);
  return result;
}
