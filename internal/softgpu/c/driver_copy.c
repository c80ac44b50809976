// Copies and fills. What the host may do with its memory when a call returns depends on the kinds
// of memory, as the driver's documentation says in its chapter on synchronous behaviour:
//
//   call    from       to         returns when
//   async   pageable   device     the source was read (it is staged), the copy itself comes later
//   async   device     pageable   the copy is done
//   async   pinned     device     at once: the source must stay as it is until the stream was there
//   async   device     pinned     at once
//   async   device     device     at once
//   async   host       host       the copy is done
//   sync    pageable   device     the source was read, behind all work of stream 0
//   sync    pinned     device     the copy is done
//   sync    device     host       the copy is done
//   sync    device     device     at once: the host does not wait
//
// A program that frees pinned memory too early, or reads it too early, goes wrong here too.
#include <stdlib.h>
#include <string.h>

#include "driver.h"

struct staging {
  atomic_int holders;
  char bytes[];
};

struct staging *sg_staging_hold(struct staging *s) {
  if (s) atomic_fetch_add(&s->holders, 1);
  return s;
}

void sg_staging_drop(struct staging *s) {
  if (s && atomic_fetch_sub(&s->holders, 1) == 1) free(s);
}

static struct staging *stage(const void *from, size_t bytes) {
  struct staging *s = malloc(sizeof *s + bytes);
  if (!s) sg_fail("a host without memory");
  atomic_store(&s->holders, 1);
  memcpy(s->bytes, from, bytes);
  return s;
}

// classify tells what kind of memory a range is. A range that begins in a known block and leaves it
// is an error of the program.
static CUresult classify(uintptr_t at, size_t bytes, enum memory_kind *kind) {
  struct block b;
  *kind = MEMORY_PAGEABLE;
  if (sg_find(at, bytes, &b))
    *kind = b.kind;
  else if (sg_find(at, 1, &b))
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

// What a function of the interface says of its two pointers.
enum side { ANY, HOST, DEVICE };

static bool fits(enum side side, enum memory_kind kind) {
  if (side == DEVICE) return kind != MEMORY_PAGEABLE;  // pinned memory has a device address
  return side == ANY || kind != MEMORY_DEVICE;
}

// plan checks the pointers of a copy.
static CUresult plan(uintptr_t to, enum side to_side, uintptr_t from, enum side from_side,
                     size_t bytes, enum memory_kind *target, enum memory_kind *source) {
  CUresult result = classify(to, bytes, target);
  if (!result) result = classify(from, bytes, source);
  if (!result && !(fits(to_side, *target) && fits(from_side, *source)))
    result = CUDA_ERROR_INVALID_VALUE;
  return result;
}

static struct work copy_work(uintptr_t to, uintptr_t from, size_t bytes) {
  return (struct work){.kind = WORK_COPY,
                       .copy = {(void *)to, (const void *)from, bytes, NULL}};
}

// staged makes the copy independent of its source.
static void staged(struct work *w) {
  w->copy.staged = stage(w->copy.from, w->copy.bytes);
  w->copy.from = w->copy.staged->bytes;
}

static CUresult copy_async(uintptr_t to, enum side to_side, uintptr_t from, enum side from_side,
                           size_t bytes, CUstream handle) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result || !bytes) return result;
  enum memory_kind target, source;
  if ((result = plan(to, to_side, from, from_side, bytes, &target, &source))) return result;
  struct work w = copy_work(to, from, bytes);
  if (s->capture) return sg_submit(s, w);  // a graph reads its sources at each launch
  if (target == MEMORY_PAGEABLE || (target == MEMORY_PINNED && source != MEMORY_DEVICE))
    return sg_submit_and_wait(s, w);
  if (source == MEMORY_PAGEABLE) staged(&w);
  return sg_submit(s, w);
}

static CUresult copy_sync(uintptr_t to, enum side to_side, uintptr_t from, enum side from_side,
                          size_t bytes) {
  struct CUstream_st *s;
  CUresult result = sg_stream(CU_STREAM_LEGACY, &s);
  if (result || !bytes) return result;
  enum memory_kind target, source;
  if ((result = plan(to, to_side, from, from_side, bytes, &target, &source))) return result;
  struct work w = copy_work(to, from, bytes);
  if (target == MEMORY_DEVICE && source == MEMORY_DEVICE) return sg_submit(s, w);
  if (target == MEMORY_DEVICE && source == MEMORY_PAGEABLE) {
    sg_finish(s);
    staged(&w);
    return sg_submit(s, w);
  }
  return sg_submit_and_wait(s, w);
}

SG_EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_sync(to, ANY, from, ANY, bytes);
}

SG_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  return copy_sync(to, DEVICE, (uintptr_t)from, HOST, bytes);
}

SG_EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  return copy_sync((uintptr_t)to, HOST, from, DEVICE, bytes);
}

SG_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_sync(to, DEVICE, from, DEVICE, bytes);
}

SG_EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_async(to, ANY, from, ANY, bytes, stream);
}

SG_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes,
                                        CUstream stream) {
  return copy_async(to, DEVICE, (uintptr_t)from, HOST, bytes, stream);
}

SG_EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes,
                                        CUstream stream) {
  return copy_async((uintptr_t)to, HOST, from, DEVICE, bytes, stream);
}

SG_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                        CUstream stream) {
  return copy_async(to, DEVICE, from, DEVICE, bytes, stream);
}

SG_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                     CUcontext from_context, size_t bytes, CUstream stream) {
  if (!to_context || !from_context) return CUDA_ERROR_INVALID_CONTEXT;
  return copy_async(to, DEVICE, from, DEVICE, bytes, stream);
}

// ---- fills

static CUresult fill(CUdeviceptr to, unsigned value, unsigned width, size_t count, bool wait,
                     CUstream handle) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result || !count) return result;
  enum memory_kind kind;
  if (to % width || classify(to, count * width, &kind) || kind == MEMORY_PAGEABLE)
    return CUDA_ERROR_INVALID_VALUE;
  struct work w = {.kind = WORK_SET,
                   .set = {(void *)to, value, width, count, 1, count * width}};
  // A fill of a GPU's memory is not waited for, not even by the functions without a stream.
  return wait && kind == MEMORY_PINNED ? sg_submit_and_wait(s, w) : sg_submit(s, w);
}

SG_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return fill(to, value, 1, count, true, CU_STREAM_LEGACY);
}

SG_EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  return fill(to, value, 2, count, true, CU_STREAM_LEGACY);
}

SG_EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
  return fill(to, value, 4, count, true, CU_STREAM_LEGACY);
}

SG_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count,
                                   CUstream stream) {
  return fill(to, value, 1, count, false, stream);
}

SG_EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count,
                                    CUstream stream) {
  return fill(to, value, 2, count, false, stream);
}

SG_EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count,
                                    CUstream stream) {
  return fill(to, value, 4, count, false, stream);
}

// ---- single words

static CUresult write_value(CUstream handle, CUdeviceptr to, uint64_t value, unsigned width) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  return sg_submit(s, (struct work){.kind = WORK_WRITE, .write = {(void *)to, value, width}});
}

SG_EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr to, uint32_t value,
                                           unsigned flags) {
  if (flags) sg_fail("cuStreamWriteValue32 with flags %u", flags);
  return write_value(stream, to, value, 4);
}

SG_EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr to, uint64_t value,
                                           unsigned flags) {
  if (flags) sg_fail("cuStreamWriteValue64 with flags %u", flags);
  return write_value(stream, to, value, 8);
}
