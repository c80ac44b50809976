// The rules of the driver that the software GPU plays, one function each: what is in order and what
// is not, and when the host may touch its memory. `rules NAME` runs one; without a name it lists
// them. A wrong answer ends the process with status 1, and a deadlock with an alarm.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softcuda.h"

#define CHECK(what)                                             \
  do {                                                          \
    if (!(what)) {                                              \
      printf("rules.c:%d: not so: %s\n", __LINE__, #what);      \
      fflush(stdout);                                           \
      _exit(1);                                                 \
    }                                                           \
  } while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)

// ---- gates: a stream stops at a gate until it is opened

struct gate {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool open;
};

static void pass(void *data) {
  struct gate *g = data;
  pthread_mutex_lock(&g->lock);
  while (!g->open) pthread_cond_wait(&g->changed, &g->lock);
  pthread_mutex_unlock(&g->lock);
}

static struct gate *stop(CUstream stream) {
  struct gate *g = calloc(1, sizeof *g);
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->changed, NULL);
  OK(cuLaunchHostFunc(stream, pass, g));
  return g;
}

static void let_go(struct gate *g) {
  pthread_mutex_lock(&g->lock);
  g->open = true;
  pthread_cond_broadcast(&g->changed);
  pthread_mutex_unlock(&g->lock);
}

static void raise_flag(void *data) { __atomic_store_n((int *)data, 1, __ATOMIC_SEQ_CST); }
static bool raised(int *flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
static void a_while(void) { usleep(30000); }

static CUstream new_stream(void) {
  CUstream s;
  OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  return s;
}

static CUevent new_event(void) {
  CUevent e;
  OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
  return e;
}

static CUdeviceptr new_memory(size_t bytes) {
  CUdeviceptr p;
  OK(cuMemAlloc_v2(&p, bytes));
  return p;
}

// clear waits: a fill of a GPU's memory is work of stream 0, which other streams are not behind.
static void clear(CUdeviceptr p, size_t bytes) {
  OK(cuMemsetD8_v2(p, 0, bytes));
  OK(cuCtxSynchronize());
}

static unsigned word(CUdeviceptr p) {
  unsigned value;
  OK(cuMemcpyDtoH_v2(&value, p, sizeof value));
  return value;
}

static void use(int device) {
  CUcontext context;
  OK(cuDevicePrimaryCtxRetain(&context, device));
  OK(cuCtxSetCurrent(context));
}

// ---- events

// A wait stands for the record that was the latest when it was called: recording the event again,
// on a stream that is stuck, does not hold it back.
static void wait_keeps_its_record(void) {
  CUstream a = new_stream(), b = new_stream(), c = new_stream();
  CUevent e = new_event();
  struct gate *first = stop(a), *second = stop(c);
  OK(cuEventRecord(e, a));
  OK(cuStreamWaitEvent(b, e, 0));
  OK(cuEventRecord(e, c));
  let_go(first);
  OK(cuStreamSynchronize(b));
  CHECK(cuEventQuery(e) == CUDA_ERROR_NOT_READY);  // the event itself is the newer record
  let_go(second);
  OK(cuEventSynchronize(e));
}

// Nor does a newer record that happens at once release it.
static void new_record_releases_no_old_wait(void) {
  CUstream a = new_stream(), b = new_stream(), c = new_stream();
  CUevent e = new_event();
  static int done;
  struct gate *g = stop(a);
  OK(cuEventRecord(e, a));
  OK(cuStreamWaitEvent(b, e, 0));
  OK(cuLaunchHostFunc(b, raise_flag, &done));
  OK(cuEventRecord(e, c));
  OK(cuEventSynchronize(e));
  a_while();
  CHECK(!raised(&done));
  let_go(g);
  OK(cuStreamSynchronize(b));
  CHECK(raised(&done));
}

// An event that was never recorded counts as done.
static void unrecorded_event_is_done(void) {
  CUstream a = new_stream();
  CUevent e = new_event();
  OK(cuEventQuery(e));
  OK(cuEventSynchronize(e));
  OK(cuStreamWaitEvent(a, e, 0));
  OK(cuStreamSynchronize(a));
}

// An event may be destroyed while a stream waits for it.
static void destroyed_event_still_orders(void) {
  CUstream a = new_stream(), b = new_stream();
  CUevent e = new_event();
  static int done;
  struct gate *g = stop(a);
  OK(cuEventRecord(e, a));
  OK(cuStreamWaitEvent(b, e, 0));
  OK(cuEventDestroy_v2(e));
  OK(cuLaunchHostFunc(b, raise_flag, &done));
  a_while();
  CHECK(!raised(&done));
  let_go(g);
  OK(cuStreamSynchronize(b));
}

// An event is recorded on streams of its own GPU, and waited for on those of any.
static void events_belong_to_a_gpu(void) {
  CUevent e = new_event();
  CUstream a = new_stream();
  struct gate *g = stop(a);
  OK(cuEventRecord(e, a));
  use(1);
  CUstream other = new_stream();
  CHECK(cuEventRecord(e, other) == CUDA_ERROR_INVALID_HANDLE);
  OK(cuStreamWaitEvent(other, e, 0));
  a_while();
  CHECK(cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
  let_go(g);
  OK(cuStreamSynchronize(other));
}

// ---- streams

// Two streams are in no order; a stream is.
static void streams_are_queues(void) {
  CUstream a = new_stream(), b = new_stream();
  static int first, second, other;
  struct gate *g = stop(a);
  OK(cuLaunchHostFunc(a, raise_flag, &first));
  OK(cuLaunchHostFunc(b, raise_flag, &other));
  OK(cuStreamSynchronize(b));
  CHECK(raised(&other) && !raised(&first));
  CHECK(cuStreamQuery(a) == CUDA_ERROR_NOT_READY);
  OK(cuLaunchHostFunc(a, raise_flag, &second));
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(raised(&first) && raised(&second));
  OK(cuStreamQuery(a));
}

// Stream 0 waits for the streams that were made without CU_STREAM_NON_BLOCKING, and they for it.
static void stream_zero_keeps_step(void) {
  CUstream blocking, free_stream = new_stream();
  OK(cuStreamCreate(&blocking, 0));
  static int zero, later;
  struct gate *in_blocking = stop(blocking), *in_free = stop(free_stream);
  OK(cuLaunchHostFunc(NULL, raise_flag, &zero));
  OK(cuLaunchHostFunc(blocking, raise_flag, &later));
  a_while();
  CHECK(!raised(&zero));
  let_go(in_blocking);
  OK(cuStreamSynchronize(NULL));  // although the other stream is stuck
  OK(cuStreamSynchronize(blocking));
  struct gate *in_zero = stop(NULL);
  static int behind_zero;
  OK(cuLaunchHostFunc(blocking, raise_flag, &behind_zero));
  a_while();
  CHECK(!raised(&behind_zero));
  let_go(in_zero);
  let_go(in_free);
  OK(cuCtxSynchronize());
  CHECK(raised(&behind_zero));
}

// Destroying a stream does not wait, and what was queued still runs.
static void destroyed_stream_finishes(void) {
  CUstream a = new_stream();
  static int done;
  struct gate *g = stop(a);
  OK(cuLaunchHostFunc(a, raise_flag, &done));
  OK(cuStreamDestroy_v2(a));
  CHECK(cuStreamQuery(a) == CUDA_ERROR_INVALID_HANDLE);
  let_go(g);
  for (int i = 0; i < 1000 && !raised(&done); i++) usleep(1000);
  CHECK(raised(&done));
}

// ---- copies

// A pageable source is read before the call returns.
static void pageable_source_is_read_at_once(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4);
  struct gate *g = stop(a);
  unsigned source = 1;
  OK(cuMemcpyHtoDAsync_v2(p, &source, sizeof source, a));
  source = 2;
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 1);
}

// A pinned source is read when the stream comes to it.
static void pinned_source_is_read_later(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4);
  unsigned *source;
  OK(cuMemHostAlloc((void **)&source, 4, 0));
  struct gate *g = stop(a);
  *source = 1;
  OK(cuMemcpyHtoDAsync_v2(p, source, sizeof *source, a));
  *source = 2;
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 2);
}

// Registering makes memory pinned, and unregistering pageable again.
static void registered_memory_is_pinned(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4);
  static unsigned source[1024];
  OK(cuMemHostRegister_v2(source, sizeof source, 0));
  CHECK(cuMemHostRegister_v2(source, 4, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  struct gate *g = stop(a);
  source[0] = 1;
  OK(cuMemcpyHtoDAsync_v2(p, source, 4, a));
  source[0] = 2;
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 2);
  OK(cuMemHostUnregister(source));
  CHECK(cuMemHostUnregister(source) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

// A pageable target is written before the call returns; a pinned one is not waited for.
static void pageable_target_is_written_at_once(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4);
  unsigned target = 0, *pinned;
  OK(cuMemHostAlloc((void **)&pinned, 4, 0));
  OK(cuMemsetD32Async(p, 7, 1, a));
  OK(cuMemcpyDtoHAsync_v2(&target, p, 4, a));
  CHECK(target == 7);
  struct gate *g = stop(a);
  OK(cuMemcpyDtoHAsync_v2(pinned, p, 4, a));
  CHECK(*pinned == 0);
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(*pinned == 7);
}

// The copy without a stream comes behind all work of stream 0, and its target is complete.
static void copy_without_stream_waits(void) {
  CUdeviceptr p = new_memory(1 << 20);
  OK(cuMemsetD8_v2(p, 1, 1 << 20));
  OK(cuMemsetD8Async(p, 2, 1 << 20, NULL));
  unsigned char last;
  OK(cuMemcpyDtoH_v2(&last, p + (1 << 20) - 1, 1));
  CHECK(last == 2);
}

// A range that leaves its allocation, and memory that is no GPU's, are refused.
static void ranges_are_checked(void) {
  CUdeviceptr p = new_memory(512);
  char host[16];
  CHECK(cuMemcpyHtoD_v2(p + 500, host, 16) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyHtoD_v2((CUdeviceptr)host, host, 16) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemsetD8_v2(p + 511, 0, 2) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemFree_v2(p));
  CHECK(cuMemFree_v2(p) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemcpyHtoD_v2(p, host, 16) == CUDA_ERROR_INVALID_VALUE);
}

// ---- memory

// Memory that is freed on a stream belongs to the stream's work until the stream is there, and to
// the next allocation on the stream then. The GPU has 64 MiB.
static void freed_memory_is_in_use_until_its_turn(void) {
  CUstream a = new_stream(), b = new_stream();
  CUdeviceptr p, q;
  OK(cuMemAllocAsync(&p, 48 << 20, a));
  struct gate *g = stop(a);
  OK(cuMemsetD8Async(p, 5, 48 << 20, a));
  OK(cuMemFreeAsync(p, a));
  CHECK(cuMemAllocAsync(&q, 48 << 20, b) == CUDA_ERROR_OUT_OF_MEMORY);
  let_go(g);
  OK(cuMemAllocAsync(&q, 48 << 20, a));
  OK(cuMemFree_v2(q));
}

// Created memory counts until it was released and unmapped, in either order.
static void created_memory_counts_until_unmapped(void) {
  size_t size = 48 << 20, free_bytes, total;
  CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle, second;
  CUdeviceptr p;
  OK(cuMemCreate(&handle, size, &properties, 0));
  CHECK(cuMemCreate(&second, size, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  OK(cuMemAddressReserve(&p, size, 0, 0, 0));
  OK(cuMemMap(p, size, 0, handle, 0));
  CHECK(cuMemMap(p, size, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);  // mapped already
  OK(cuMemSetAccess(p, size, &access, 1));
  OK(cuMemsetD32Async(p, 9, size / 4, NULL));
  CHECK(word(p + size - 4) == 9);
  OK(cuMemRelease(handle));
  CHECK(word(p) == 9);
  OK(cuMemGetInfo_v2(&free_bytes, &total));
  CHECK(free_bytes == total - size);
  OK(cuMemUnmap(p, size));
  OK(cuMemGetInfo_v2(&free_bytes, &total));
  CHECK(free_bytes == total);
  OK(cuMemAddressFree(p, size));
}

// Memory that nobody has written is no zeros: all bits are ones, also where it was freed before.
static void fresh_memory_is_poisoned(void) {
  size_t size = 40 << 20;
  for (int i = 0; i < 2; i++) {
    CUdeviceptr p = new_memory(size);
    CHECK(word(p) == ~0u && word(p + size / 2) == ~0u && word(p + size - 4) == ~0u);
    clear(p, size);
    CHECK(word(p) == 0 && word(p + size - 4) == 0);
    OK(cuMemFree_v2(p));
  }
  CUmemAllocationProp properties = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
  CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemGenericAllocationHandle handle;
  CUdeviceptr p;
  OK(cuMemCreate(&handle, size, &properties, 0));
  OK(cuMemAddressReserve(&p, size, 0, 0, 0));
  OK(cuMemMap(p, size, 0, handle, 0));
  OK(cuMemSetAccess(p, size, &access, 1));
  CHECK(word(p) == ~0u && word(p + (16 << 20) - 4) == ~0u);  // the first 16 MiB are
}

// Freeing waits for what is queued.
static void free_waits(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(1 << 20);
  for (int i = 0; i < 20; i++) OK(cuMemsetD8Async(p, (unsigned char)i, 1 << 20, a));
  OK(cuMemFree_v2(p));
  OK(cuStreamQuery(a));
}

// ---- graphs

static CUgraphNode add_set(CUgraph g, CUdeviceptr p, unsigned value, CUgraphNode need) {
  CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
                              .memset = {.dst = p, .value = value, .elementSize = 4, .width = 1,
                                         .height = 1}};
  CUgraphNode node;
  OK(cuGraphAddNode_v2(&node, g, need ? &need : NULL, NULL, need ? 1 : 0, &params));
  return node;
}

static CUgraphExec instance(CUgraph g) {
  CUgraphExec x;
  OK(cuGraphInstantiateWithFlags(&x, g, 0));
  return x;
}

static CUgraph new_graph(void) {
  CUgraph g;
  OK(cuGraphCreate(&g, 0));
  return g;
}

// A launch runs the graph as it is at the call: an update afterwards is for the next launch, and
// the instance may end.
static void launch_is_a_snapshot(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(8);
  CUgraph g = new_graph();
  CUgraphNode node = add_set(g, p, 1, NULL);
  CUgraphExec x = instance(g);
  struct gate *stuck = stop(a);
  OK(cuGraphLaunch(x, a));
  OK(cuMemcpyDtoDAsync_v2(p + 4, p, 4, a));
  CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
                              .memset = {.dst = p, .value = 2, .elementSize = 4, .width = 1,
                                         .height = 1}};
  OK(cuGraphExecNodeSetParams(x, node, &params));
  OK(cuGraphLaunch(x, a));
  OK(cuGraphExecDestroy(x));
  OK(cuGraphDestroy(g));
  let_go(stuck);
  OK(cuStreamSynchronize(a));
  CHECK(word(p + 4) == 1);
  CHECK(word(p) == 2);
}

// An instance does not change with the graph it was made from, nor a graph with its child's
// original.
static void copies_of_graphs_are_independent(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(12);
  clear(p, 12);
  CUgraph child = new_graph(), g = new_graph();
  CUgraphNode first = add_set(child, p, 1, NULL), inside;
  OK(cuGraphAddChildGraphNode(&inside, g, NULL, 0, child));
  add_set(child, p + 4, 1, first);  // not in g
  CUgraphExec x = instance(g);
  add_set(g, p + 8, 1, inside);  // not in x
  OK(cuGraphLaunch(x, a));
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 1 && word(p + 4) == 0 && word(p + 8) == 0);
}

static int inside_count, overlaps;

static void enter(void *data) {
  (void)data;
  if (__atomic_fetch_add(&inside_count, 1, __ATOMIC_SEQ_CST)) overlaps = 1;
  usleep(2000);
  __atomic_fetch_sub(&inside_count, 1, __ATOMIC_SEQ_CST);
}

// Two launches of one instance do not overlap, on two streams neither.
static void launches_of_an_instance_do_not_overlap(void) {
  CUstream a = new_stream(), b = new_stream();
  CUgraph g = new_graph();
  CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {enter, NULL}};
  CUgraphNode node;
  OK(cuGraphAddNode_v2(&node, g, NULL, NULL, 0, &params));
  CUgraphExec x = instance(g);
  for (int i = 0; i < 20; i++) OK(cuGraphLaunch(x, i % 2 ? a : b));
  OK(cuCtxSynchronize());
  CHECK(!overlaps);
}

// Nodes run behind what they need, in whatever order the rest runs.
static void nodes_run_behind_what_they_need(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4 * 64);
  CUgraph g = new_graph();
  CUgraphNode chain = NULL;
  for (unsigned i = 1; i <= 8; i++) {
    chain = add_set(g, p, i, chain);  // a chain on one word
    add_set(g, p + 4 * i, i, NULL);   // and others beside it
  }
  CUgraphExec x = instance(g);
  for (int round = 0; round < 30; round++) {
    OK(cuGraphLaunch(x, a));
    OK(cuStreamSynchronize(a));
    CHECK(word(p) == 8);
    for (unsigned i = 1; i <= 8; i++) CHECK(word(p + 4 * i) == i);
  }
}

// ---- capture

// Calls on a stream that captures do not run; a stream that waits for an event of the capture
// joins it, and must be waited for before the capture ends.
static void capture_forks_and_joins(void) {
  CUstream a = new_stream(), b = new_stream();
  CUdeviceptr p = new_memory(8);
  clear(p, 8);
  CUevent fork = new_event(), join = new_event();
  CUgraph g;
  CUstreamCaptureStatus status;
  OK(cuStreamBeginCapture_v2(a, 0));
  OK(cuMemsetD32Async(p, 1, 1, a));
  OK(cuEventRecord(fork, a));
  OK(cuStreamWaitEvent(b, fork, 0));
  OK(cuStreamIsCapturing(b, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cuMemcpyDtoDAsync_v2(p + 4, p, 4, b));
  CHECK(cuEventQuery(fork) == CUDA_ERROR_CAPTURED_EVENT);
  CHECK(cuStreamSynchronize(a) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  OK(cuEventRecord(join, b));
  OK(cuStreamWaitEvent(a, join, 0));
  OK(cuMemsetD32Async(p, 3, 1, a));
  CHECK(cuStreamEndCapture(b, &g) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  OK(cuStreamEndCapture(a, &g));
  OK(cuStreamIsCapturing(b, &status));
  CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(word(p) == 0);
  CUgraphExec x = instance(g);
  OK(cuGraphLaunch(x, a));
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 3 && word(p + 4) == 1);

  OK(cuStreamBeginCapture_v2(a, 0));
  OK(cuEventRecord(fork, a));
  OK(cuStreamWaitEvent(b, fork, 0));
  OK(cuMemsetD32Async(p, 4, 1, b));
  CHECK(cuStreamEndCapture(a, &g) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
}

// A capture cannot wait for work outside of it.
static void capture_is_isolated(void) {
  CUstream a = new_stream(), b = new_stream();
  CUevent outside = new_event();
  OK(cuEventRecord(outside, b));
  OK(cuStreamBeginCapture_v2(a, 0));
  CHECK(cuStreamWaitEvent(a, outside, 0) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
}

// ---- memory of another process

static CUipcMemHandle handle_of(CUdeviceptr p) {
  CUipcMemHandle handle;
  OK(cuIpcGetMemHandle(&handle, p));
  return handle;
}

// other starts this program with a handle as its standard input, to do one of others below.
static pid_t other(const char *name, CUipcMemHandle handle) {
  int ends[2];
  CHECK(!pipe(ends));
  CHECK(write(ends[1], &handle, sizeof handle) == sizeof handle);
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    dup2(ends[0], 0);
    execl("/proc/self/exe", "rules", name, NULL);
    _exit(3);
  }
  close(ends[0]);
  close(ends[1]);
  return child;
}

static int status_of(pid_t child) {
  int status;
  CHECK(waitpid(child, &status, WUNTRACED) == child);
  return status;
}

static CUipcMemHandle given(void) {
  CUipcMemHandle handle;
  CHECK(read(0, &handle, sizeof handle) == sizeof handle);
  return handle;
}

static CUdeviceptr opened(CUipcMemHandle handle) {
  CUdeviceptr p;
  OK(cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  return p;
}

static void opens(void) {
  CUipcMemHandle handle = given();
  CUdeviceptr p = opened(handle), start;
  size_t bytes, before, after, total;
  OK(cuMemGetAddressRange_v2(&start, &bytes, p + 1024));
  CHECK(start == p && bytes == 4096);
  CHECK(word(p + 1024) == 7);
  OK(cuMemGetInfo_v2(&before, &total));
  CHECK(opened(handle) == p);  // once more is the same, and counts
  OK(cuIpcCloseMemHandle(p));
  OK(cuMemsetD32Async(p + 1024, 9, 1, NULL));
  OK(cuCtxSynchronize());
  OK(cuIpcCloseMemHandle(p));
  OK(cuMemGetInfo_v2(&after, &total));
  CHECK(before == after && after == total);  // it is the owner who pays
  CHECK(cuIpcCloseMemHandle(p) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuMemGetAddressRange_v2(&start, &bytes, p) == CUDA_ERROR_NOT_FOUND);
}

// A handle is the whole allocation, whatever pointer into it was given; both processes see what
// the other has written.
static void another_process_opens_memory(void) {
  CUdeviceptr p = new_memory(4096);
  unsigned seven = 7;
  OK(cuMemcpyHtoD_v2(p + 1024, &seven, sizeof seven));
  OK(cuCtxSynchronize());
  CUipcMemHandle whole = handle_of(p), inside = handle_of(p + 1024);
  CHECK(!memcmp(&whole, &inside, sizeof whole));
  CHECK(status_of(other("opens", inside)) == 0);
  CHECK(word(p + 1024) == 9);
}

static void is_refused(void) {
  CUipcMemHandle handle = given();
  CUdeviceptr p;
  CHECK(cuIpcOpenMemHandle_v2(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
        CUDA_ERROR_INVALID_VALUE);
}

// A handle of freed memory stays one of freed memory when there is new memory, and a process does
// not open its own. Memory of a pool, and of the host, has no handle.
static void another_process_is_refused(void) {
  CUdeviceptr p = new_memory(4096), q;
  CUipcMemHandle old = handle_of(p), none;
  CHECK(cuIpcOpenMemHandle_v2(&q, old, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
        CUDA_ERROR_INVALID_CONTEXT);
  OK(cuMemFree_v2(p));
  CHECK(cuIpcGetMemHandle(&none, p) == CUDA_ERROR_INVALID_VALUE);
  CHECK(status_of(other("is_refused", old)) == 0);
  CUipcMemHandle fresh = handle_of(new_memory(4096));
  CHECK(memcmp(&old, &fresh, sizeof old));
  CHECK(status_of(other("is_refused", old)) == 0);
  memset(&none, 'x', sizeof none);
  CHECK(status_of(other("is_refused", none)) == 0);
  void *host;
  OK(cuMemHostAlloc(&host, 4096, 0));
  CHECK(cuIpcGetMemHandle(&none, (CUdeviceptr)host) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemAllocAsync(&q, 4096, NULL));
  CHECK(cuIpcGetMemHandle(&none, q) == CUDA_ERROR_INVALID_VALUE);
}

static void keeps(void) {
  CUdeviceptr p = opened(given());
  CHECK(word(p) == 0);
  raise(SIGSTOP);
  word(p);
}

// Who reads memory that its owner has freed meanwhile ends there.
static void another_process_ends_with_freed_memory(void) {
  CUdeviceptr p = new_memory(4096);
  clear(p, 4096);
  pid_t child = other("keeps", handle_of(p));
  int status = status_of(child);
  CHECK(WIFSTOPPED(status));
  OK(cuMemFree_v2(p));
  kill(child, SIGCONT);
  status = status_of(child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

// ---- kernels

static const char add_one[] =
    ".version 8.8\n.target sm_100\n.address_size 64\n"
    ".visible .global .align 4 .u32 step = 1;\n"
    ".visible .entry add_one(.param .u64 p, .param .u32 by)\n{\n"
    "  .reg .b64 %rd<3>;\n  .reg .b32 %r<4>;\n"
    "  ld.param.u64 %rd1, [p];\n  ld.param.u32 %r1, [by];\n"
    "  ld.global.u32 %r2, [%rd1];\n  add.s32 %r3, %r2, %r1;\n"
    "  st.global.u32 [%rd1], %r3;\n  ret;\n}\n";

static CUfunction kernel(CUmodule *module) {
  CUfunction f;
  OK(cuModuleLoadData(module, add_one));
  OK(cuModuleGetFunction(&f, *module, "add_one"));
  return f;
}

// The values of parameters are read at the call.
static void parameters_are_copied(void) {
  CUstream a = new_stream();
  CUdeviceptr p = new_memory(4);
  clear(p, 4);
  CUmodule module;
  CUfunction f = kernel(&module);
  struct gate *g = stop(a);
  unsigned by = 3;
  void *params[] = {&p, &by};
  OK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, a, params, NULL));
  by = 100;
  let_go(g);
  OK(cuStreamSynchronize(a));
  CHECK(word(p) == 3);
  CHECK(cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, a, params, NULL) == CUDA_ERROR_INVALID_VALUE);
  CHECK(cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, a, params, NULL) == CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr step;
  size_t bytes;
  OK(cuModuleGetGlobal_v2(&step, &bytes, module, "step"));
  CHECK(bytes == 4 && word(step) == 1);
  CHECK(cuModuleGetGlobal_v2(&step, &bytes, module, "stride") == CUDA_ERROR_NOT_FOUND);
  OK(cuModuleUnload(module));
}

// A kernel runs on the GPU that its module was loaded on.
static void kernels_belong_to_a_gpu(void) {
  CUmodule module;
  CUfunction f = kernel(&module);
  CUdeviceptr p = new_memory(4);
  unsigned by = 1;
  void *params[] = {&p, &by};
  use(1);
  CHECK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, new_stream(), params, NULL) ==
        CUDA_ERROR_INVALID_HANDLE);
}

// A failed kernel is learnt of later; then every call about the GPU fails, whoever waits is
// released, and the other GPU works. Run with SOFTGPU_XID=0:2:719.
static void failed_gpu_stays_failed(void) {
  CUstream a = new_stream(), b = new_stream();
  CUevent e = new_event();
  CUdeviceptr p = new_memory(4), q;
  static int called;
  clear(p, 4);
  CUmodule module;
  CUfunction f = kernel(&module);
  unsigned by = 1;
  void *params[] = {&p, &by};
  struct gate *g = stop(a);
  OK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, a, params, NULL));
  OK(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, a, params, NULL));
  OK(cuLaunchHostFunc(a, raise_flag, &called));
  OK(cuEventRecord(e, a));
  OK(cuStreamWaitEvent(b, e, 0));
  let_go(g);
  CHECK(cuStreamSynchronize(b) == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(cuStreamSynchronize(a) == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(cuMemAlloc_v2(&q, 4) == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(cuEventQuery(e) == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(cuCtxSynchronize() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(*(unsigned *)p == 1 && !raised(&called));
  use(1);
  q = new_memory(4);
  OK(cuMemsetD32Async(q, 5, 1, NULL));
  CHECK(word(q) == 5);
}

struct rule { const char *name; void (*run)(void); };

// What the other process does.
static const struct rule others[] = {{"opens", opens}, {"is_refused", is_refused}, {"keeps", keeps}};

static const struct rule rules[] = {
#define RULE(name) {#name, name}
    RULE(wait_keeps_its_record),
    RULE(new_record_releases_no_old_wait),
    RULE(unrecorded_event_is_done),
    RULE(destroyed_event_still_orders),
    RULE(events_belong_to_a_gpu),
    RULE(streams_are_queues),
    RULE(stream_zero_keeps_step),
    RULE(destroyed_stream_finishes),
    RULE(pageable_source_is_read_at_once),
    RULE(pinned_source_is_read_later),
    RULE(registered_memory_is_pinned),
    RULE(pageable_target_is_written_at_once),
    RULE(copy_without_stream_waits),
    RULE(ranges_are_checked),
    RULE(freed_memory_is_in_use_until_its_turn),
    RULE(created_memory_counts_until_unmapped),
    RULE(fresh_memory_is_poisoned),
    RULE(free_waits),
    RULE(launch_is_a_snapshot),
    RULE(copies_of_graphs_are_independent),
    RULE(launches_of_an_instance_do_not_overlap),
    RULE(nodes_run_behind_what_they_need),
    RULE(capture_forks_and_joins),
    RULE(capture_is_isolated),
    RULE(another_process_opens_memory),
    RULE(another_process_is_refused),
    RULE(another_process_ends_with_freed_memory),
    RULE(parameters_are_copied),
    RULE(kernels_belong_to_a_gpu),
    RULE(failed_gpu_stays_failed),
};

int main(int argc, char **argv) {
  size_t n = sizeof rules / sizeof *rules;
  for (size_t i = 0; argc == 1 && i < n; i++) puts(rules[i].name);
  if (argc == 1) return 0;
  alarm(60);
  OK(cuInit(0));
  use(0);
  for (size_t i = 0; i < n; i++)
    if (!strcmp(rules[i].name, argv[1])) {
      rules[i].run();
      return 0;
    }
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    if (!strcmp(others[i].name, argv[1])) {
      others[i].run();
      return 0;
    }
  return 2;
}
