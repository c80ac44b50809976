// Memory of the GPUs and pinned memory of the host. Both are memory of the process: a device
// pointer is an address, so one address means one thing everywhere, as with unified addressing.
// Pages come when they are first touched, so a GPU costs the host only what is used of it.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

// ---- the table of blocks, by address

static pthread_rwlock_t table_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct block *table;
static size_t table_count, table_room;
static unsigned long long next_id = 1;

// after finds the first block that begins behind an address. The lock is held.
static size_t after(uintptr_t at) {
  size_t low = 0, high = table_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (table[middle].start > at)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// covering finds the block that holds an address, or NULL. The lock is held.
static struct block *covering(uintptr_t at) {
  size_t i = after(at);
  if (i == 0) return NULL;
  struct block *b = &table[i - 1];
  return at - b->start < b->bytes ? b : NULL;
}

static void insert(struct block b) {
  if (table_count == table_room) {
    table_room = table_room ? 2 * table_room : 64;
    table = realloc(table, table_room * sizeof *table);
    if (!table) sg_fail("a host without memory");
  }
  size_t i = after(b.start);
  memmove(table + i + 1, table + i, (table_count - i) * sizeof *table);
  b.id = next_id++;
  table[i] = b;
  table_count++;
}

static void erase(struct block *b) {
  size_t i = (size_t)(b - table);
  table_count--;
  memmove(table + i, table + i + 1, (table_count - i) * sizeof *table);
}

bool sg_find(uintptr_t start, size_t bytes, struct block *found) {
  pthread_rwlock_rdlock(&table_lock);
  struct block *b = covering(start);
  bool whole = b && bytes <= b->bytes - (start - b->start);
  if (whole) *found = *b;
  pthread_rwlock_unlock(&table_lock);
  return whole;
}

void sg_memory_lend(void *start, size_t bytes, struct gpu *gpu) {
  pthread_rwlock_wrlock(&table_lock);
  insert((struct block){.start = (uintptr_t)start, .bytes = bytes ? bytes : 1,
                        .kind = MEMORY_DEVICE, .gpu = gpu});
  pthread_rwlock_unlock(&table_lock);
}

void sg_memory_return(void *start) {
  pthread_rwlock_wrlock(&table_lock);
  struct block *b = covering((uintptr_t)start);
  if (b && b->start == (uintptr_t)start && !b->owned && !b->mapped) erase(b);
  pthread_rwlock_unlock(&table_lock);
}

// ---- allocation in one step

// charge takes bytes of a GPU's memory, or refuses. The lock is held for writing.
static bool charge(struct gpu *gpu, size_t bytes) {
  if (bytes > gpu->memory - gpu->used) {
    sg_log("GPU %d: out of memory: %zu bytes asked, %zu of %zu used", gpu->place, bytes,
           gpu->used, gpu->memory);
    return false;
  }
  gpu->used += bytes;
  sg_log("GPU %d: %zu bytes taken, %zu of %zu used", gpu->place, bytes, gpu->used, gpu->memory);
  return true;
}

// Allocations are aligned to 512 bytes and their sizes are multiples of that.
static size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// zeroed gives memory of the host, which the kernel has zeroed.
static void *zeroed(size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, enum memory_kind kind,
                         struct gpu *gpu, bool shared) {
  if (!pointer || !bytes) return CUDA_ERROR_INVALID_VALUE;
  size_t size = rounded(bytes, 512), charged = kind == MEMORY_DEVICE ? size : 0;
  CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
  pthread_rwlock_wrlock(&table_lock);
  if (charge(gpu, charged)) {
    int file = -1;
    void *at = shared ? sg_share(size, &file)
                      : kind == MEMORY_DEVICE ? sg_poisoned(size) : zeroed(size);
    if (!at) {
      gpu->used -= charged;
    } else {
      insert((struct block){.start = (uintptr_t)at, .bytes = size, .kind = kind, .gpu = gpu,
                            .charged = charged, .owned = true, .shared = shared, .file = file});
      *pointer = (uintptr_t)at;
      result = CUDA_SUCCESS;
    }
  }
  pthread_rwlock_unlock(&table_lock);
  return result;
}

// release unmaps a block that allocate made. Its address is unmapped at once, so that work which
// still uses it ends the process instead of reading what is there by luck.
static CUresult release(CUdeviceptr pointer, enum memory_kind kind) {
  pthread_rwlock_wrlock(&table_lock);
  struct block *b = covering(pointer);
  bool found = b && b->start == pointer && b->owned && b->kind == kind;
  if (found) {
    b->gpu->used -= b->charged;
    munmap((void *)b->start, b->bytes);
    if (b->shared) sg_unshare(b->file);
    erase(b);
  }
  pthread_rwlock_unlock(&table_lock);
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sg_memory_free(CUdeviceptr pointer) { return release(pointer, MEMORY_DEVICE); }

#define CURRENT()                                \
  struct gpu *gpu = sg_current();              \
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;  \
  if (sg_error(gpu)) return sg_error(gpu)

SG_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  CURRENT();
  pthread_rwlock_rdlock(&table_lock);
  *total = gpu->memory;
  *free_bytes = gpu->memory - gpu->used;
  pthread_rwlock_unlock(&table_lock);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  CURRENT();
  return allocate(pointer, bytes, MEMORY_DEVICE, gpu, sg_shared());
}

// cuMemFree returns when the work is done that was queued before: it may use the memory.
SG_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
  if (!pointer) return CUDA_SUCCESS;
  struct block b;
  if (!sg_find(pointer, 1, &b)) return CUDA_ERROR_INVALID_VALUE;
  sg_finish_gpu(b.gpu);
  return sg_memory_free(pointer);
}

SG_EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  (void)flags;  // portable, mapped, write-combined: all pinned memory here is the first two
  CURRENT();
  CUdeviceptr at;
  CUresult result = allocate(&at, bytes, MEMORY_PINNED, gpu, false);
  if (result == CUDA_SUCCESS) *pointer = (void *)at;
  return result;
}

SG_EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) {
  return cuMemHostAlloc(pointer, bytes, 0);
}

SG_EXPORT CUresult cuMemFreeHost(void *pointer) {
  struct block b;
  if (!sg_find((uintptr_t)pointer, 1, &b)) return CUDA_ERROR_INVALID_VALUE;
  sg_finish_gpu(b.gpu);
  return release((uintptr_t)pointer, MEMORY_PINNED);
}

// Registering pins memory that the program has allocated. It must not be pinned already.
SG_EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags) {
  (void)flags;
  CURRENT();
  if (!pointer || !bytes) return CUDA_ERROR_INVALID_VALUE;
  uintptr_t start = (uintptr_t)pointer;
  CUresult result = CUDA_SUCCESS;
  pthread_rwlock_wrlock(&table_lock);
  size_t next = after(start);
  if (covering(start) || (next < table_count && table[next].start < start + bytes))
    result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  else
    insert((struct block){.start = start, .bytes = bytes, .kind = MEMORY_PINNED, .gpu = gpu});
  pthread_rwlock_unlock(&table_lock);
  return result;
}

SG_EXPORT CUresult cuMemHostUnregister(void *pointer) {
  pthread_rwlock_wrlock(&table_lock);
  struct block *b = covering((uintptr_t)pointer);
  bool found = b && b->start == (uintptr_t)pointer && b->kind == MEMORY_PINNED && !b->owned;
  if (found) erase(b);
  pthread_rwlock_unlock(&table_lock);
  return found ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

SG_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *to, void *pointer, unsigned flags) {
  struct block b;
  if (flags || !sg_find((uintptr_t)pointer, 1, &b)) return CUDA_ERROR_INVALID_VALUE;
  *to = (uintptr_t)pointer;
  return CUDA_SUCCESS;
}

// ---- stream-ordered allocation

struct CUmemPoolHandle_st {
  struct gpu *gpu;
};
static struct CUmemPoolHandle_st pools[SG_MAX_GPUS];

SG_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  struct gpu *gpu = sg_gpu(device);
  if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
  pools[device].gpu = gpu;
  *pool = &pools[device];
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
  return cuDeviceGetDefaultMemPool(pool, device);
}

// How much a pool keeps for reuse changes speed alone.
SG_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int which, void *value) {
  (void)which;
  return pool && value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// GPUs of a process reach each other's pools.
SG_EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access,
                                      size_t count) {
  (void)access;
  (void)count;
  return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The address is known at once; the memory may be used by work that comes behind the call on the
// stream. What was freed on the stream before is available, so a full GPU is tried again when the
// stream has come that far.
SG_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                           CUstream handle) {
  struct CUstream_st *stream;
  CUresult result = sg_stream(handle, &stream);
  if (result) return result;
  if (!pool || !pool->gpu) return CUDA_ERROR_INVALID_VALUE;
  if (stream->capture) sg_fail("allocation inside a graph");
  result = allocate(pointer, bytes, MEMORY_DEVICE, pool->gpu, false);
  if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
  sg_finish(stream);
  return allocate(pointer, bytes, MEMORY_DEVICE, pool->gpu, false);
}

SG_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream handle) {
  struct CUstream_st *stream;
  CUresult result = sg_stream(handle, &stream);
  if (result) return result;
  CUmemoryPool pool;
  cuDeviceGetDefaultMemPool(&pool, stream->gpu->ordinal);
  return cuMemAllocFromPoolAsync(pointer, bytes, pool, handle);
}

SG_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  struct CUstream_st *stream;
  CUresult result = sg_stream(handle, &stream);
  if (result) return result;
  if (stream->capture) sg_fail("freeing memory inside a graph");
  struct block b;
  if (!sg_find(pointer, 1, &b) || b.start != pointer || !b.owned || b.kind != MEMORY_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  return sg_submit(stream, (struct work){.kind = WORK_FREE, .freed = pointer});
}

// ---- allocation in two steps: addresses are reserved, memory is created, one is mapped to the
// other, and then access is given

enum { PAGE = 2 << 20 };

struct reservation {
  uintptr_t start;
  size_t bytes;
  struct reservation *next;
};

// created memory lives until it was released and its last mapping is gone, whichever is later.
struct created {
  int file;
  struct gpu *gpu;  // NULL: memory of the host
  size_t bytes;
  int mappings;
  bool released;
};

struct mapping {
  uintptr_t start;
  size_t bytes;
  struct created *created;
  struct mapping *next;
};

static struct reservation *reservations;  // these two are guarded by table_lock
static struct mapping *mappings;

SG_EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p,
                                                 int option) {
  (void)p;
  (void)option;
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment,
                                       CUdeviceptr at, unsigned long long flags) {
  (void)at;  // a wish
  if (flags || !bytes || bytes % PAGE || (alignment & (alignment - 1)))
    return CUDA_ERROR_INVALID_VALUE;
  if (alignment < PAGE) alignment = PAGE;
  char *whole = mmap(NULL, bytes + alignment, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  uintptr_t start = rounded((uintptr_t)whole, alignment);
  size_t before = start - (uintptr_t)whole;
  if (before) munmap(whole, before);
  if (alignment > before) munmap((void *)(start + bytes), alignment - before);
  struct reservation *r = malloc(sizeof *r);
  *r = (struct reservation){start, bytes, NULL};
  pthread_rwlock_wrlock(&table_lock);
  r->next = reservations;
  reservations = r;
  pthread_rwlock_unlock(&table_lock);
  *pointer = start;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_rwlock_wrlock(&table_lock);
  for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
    struct reservation *r = *at;
    if (r->start != pointer || r->bytes != bytes) continue;
    *at = r->next;
    munmap((void *)r->start, r->bytes);
    free(r);
    result = CUDA_SUCCESS;
    break;
  }
  pthread_rwlock_unlock(&table_lock);
  return result;
}

SG_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                               const CUmemAllocationProp *properties, unsigned long long flags) {
  if (flags || !bytes || bytes % PAGE) return CUDA_ERROR_INVALID_VALUE;
  struct gpu *gpu = NULL;
  if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    gpu = sg_gpu(properties->location.id);
    if (!gpu) return CUDA_ERROR_INVALID_DEVICE;
    pthread_rwlock_wrlock(&table_lock);
    bool fits = charge(gpu, bytes);
    pthread_rwlock_unlock(&table_lock);
    if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  struct created *c = malloc(sizeof *c);
  *c = (struct created){.file = memfd_create("softgpu", MFD_CLOEXEC), .gpu = gpu,
                        .bytes = bytes};
  if (c->file < 0 || ftruncate(c->file, (off_t)bytes)) sg_fail("a host without memory files");
  if (gpu) sg_poison_file(c->file, bytes);
  *handle = (uintptr_t)c;
  return CUDA_SUCCESS;
}

// settle frees created memory if nobody holds it any more. The lock is held.
static void settle(struct created *c) {
  if (!c->released || c->mappings) return;
  if (c->gpu) c->gpu->used -= c->bytes;
  close(c->file);
  free(c);
}

SG_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct created *c = (struct created *)handle;
  pthread_rwlock_wrlock(&table_lock);
  c->released = true;
  settle(c);
  pthread_rwlock_unlock(&table_lock);
  return CUDA_SUCCESS;
}

// A mapping is not accessible until cuMemSetAccess says so.
SG_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                            CUmemGenericAllocationHandle handle, unsigned long long flags) {
  struct created *c = (struct created *)handle;
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_rwlock_wrlock(&table_lock);
  bool reserved = false;
  for (struct reservation *r = reservations; r; r = r->next)
    if (pointer >= r->start && pointer + bytes <= r->start + r->bytes) reserved = true;
  size_t next = after(pointer);
  bool taken = covering(pointer) || (next < table_count && table[next].start < pointer + bytes);
  if (reserved && !taken && !flags && bytes && bytes % PAGE == 0 && offset + bytes <= c->bytes &&
      mmap((void *)pointer, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, c->file,
           (off_t)offset) != MAP_FAILED) {
    struct mapping *m = malloc(sizeof *m);
    *m = (struct mapping){pointer, bytes, c, mappings};
    mappings = m;
    c->mappings++;
    insert((struct block){.start = pointer, .bytes = bytes, .mapped = true,
                          .kind = c->gpu ? MEMORY_DEVICE : MEMORY_PINNED,
                          .gpu = c->gpu ? c->gpu : sg_gpu(0)});
    result = CUDA_SUCCESS;
  }
  pthread_rwlock_unlock(&table_lock);
  return result;
}

// Unmapping does not wait for work on the GPU. Work that still uses the range ends the process.
SG_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  pthread_rwlock_wrlock(&table_lock);
  for (struct mapping **at = &mappings; *at;) {
    struct mapping *m = *at;
    if (m->start < pointer || m->start + m->bytes > pointer + bytes) {
      at = &m->next;
      continue;
    }
    *at = m->next;
    erase(covering(m->start));
    mmap((void *)m->start, m->bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    m->created->mappings--;
    settle(m->created);
    free(m);
    result = CUDA_SUCCESS;
  }
  pthread_rwlock_unlock(&table_lock);
  return result;
}

SG_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access,
                                  size_t count) {
  int rights = PROT_NONE;
  for (size_t i = 0; i < count; i++) {
    if (access[i].flags & CU_MEM_ACCESS_FLAGS_PROT_READ) rights |= PROT_READ;
    if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) rights |= PROT_WRITE;
  }
  struct block b;
  if (!sg_find(pointer, 1, &b) || !b.mapped) return CUDA_ERROR_INVALID_VALUE;
  return mprotect((void *)pointer, bytes, rights) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// ---- questions about pointers

SG_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr pointer) {
  struct block b;
  if (!sg_find(pointer, 1, &b)) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = b.start;
  if (bytes) *bytes = b.bytes;
  return CUDA_SUCCESS;
}

static CUresult answer(void *value, CUpointer_attribute which, CUdeviceptr pointer,
                       const struct block *b) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = &b->gpu->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned *)value =
          b->kind == MEMORY_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:  // the host cannot read a real GPU's memory
      if (b->kind == MEMORY_DEVICE) return CUDA_ERROR_INVALID_VALUE;
      *(CUdeviceptr *)value = pointer;
      break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)value = b->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(char *)value = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = b->gpu->ordinal; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)value = b->shared; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)value = b->start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)value = b->bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(char *)value = 1; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:  // nothing is exported but by cuIpcGetMemHandle
      *(uint64_t *)value = 0;
      break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(CUmemoryPool *)value = NULL; break;
    default: sg_fail("attribute %d of a pointer", (int)which);
  }
  return CUDA_SUCCESS;
}

// size_of is the size of an answer in bytes.
static size_t size_of(CUpointer_attribute which) {
  switch (which) {
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED: return 1;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: return 4;
    default: return 8;
  }
}

// Memory that the driver does not know is an error for one question, and for several a list of
// empty answers.
SG_EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which,
                                         CUdeviceptr pointer) {
  struct block b;
  if (!sg_find(pointer, 1, &b)) return CUDA_ERROR_INVALID_VALUE;
  return answer(value, which, pointer, &b);
}

SG_EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *which,
                                          void **values, CUdeviceptr pointer) {
  struct block b;
  bool known = sg_find(pointer, 1, &b);
  for (unsigned i = 0; i < count; i++) {
    if (known && answer(values[i], which[i], pointer, &b) == CUDA_SUCCESS) continue;
    memset(values[i], 0, size_of(which[i]));
    if (which[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)values[i] = -2;
  }
  return CUDA_SUCCESS;
}
