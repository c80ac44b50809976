// Streams, events and host functions. A stream is a queue and a thread that works it off, so two
// streams are in no order unless an event puts them in one: what a program forgets to order comes
// out in another order here sooner or later, and with SOFTGPU_DELAY_SEED sooner.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

// ---- delays

// Every operation of a stream may be late: SOFTGPU_DELAY_SEED gives the sequence of delays, each
// stream its own, SOFTGPU_DELAY_US the longest; SOFTGPU_ORDER_SEED the order inside of kernels. SOFTGPU_SLOW=gpu:us makes one GPU late always.
static pthread_once_t delays_once = PTHREAD_ONCE_INIT;
static uint64_t delay_seed;
static long delay_most, slow_gpu, slow_us;

static void read_delays(void) {
  delay_seed = (uint64_t)sg_setting("SOFTGPU_DELAY_SEED", 0);
  ptx_seed = (uint64_t)sg_setting("SOFTGPU_ORDER_SEED", 0);
  delay_most = (long)sg_setting("SOFTGPU_DELAY_US", 300);
  const char *slow = getenv("SOFTGPU_SLOW"), *colon = slow ? strchr(slow, ':') : NULL;
  slow_gpu = colon ? atol(slow) : -1;
  slow_us = colon ? atol(colon + 1) : 0;
}

// next_random is the generator splitmix64.
static uint64_t next_random(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

static void sleep_us(long us) {
  struct timespec t = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&t, NULL);
}

// Half of the operations are not delayed: a long delay of all hides as much as none.
void sg_delay(struct CUstream_st *s) {
  pthread_once(&delays_once, read_delays);
  long us = s->gpu->place == slow_gpu ? slow_us : 0;
  if (delay_seed && delay_most > 0) {
    uint64_t r = next_random(&s->random);
    if (r & 1) us += (long)((r >> 1) % (uint64_t)delay_most);
  }
  if (us) sleep_us(us);
}

bool sg_shuffled(void) {
  pthread_once(&delays_once, read_delays);
  return delay_seed != 0;
}

uint64_t sg_random(struct CUstream_st *s) { return next_random(&s->random); }

// ---- records

struct record *sg_record_new(void) {
  struct record *r = calloc(1, sizeof *r);
  atomic_store(&r->holders, 1);
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->changed, NULL);
  return r;
}

struct record *sg_record_hold(struct record *r) {
  if (r) atomic_fetch_add(&r->holders, 1);
  return r;
}

void sg_record_drop(struct record *r) {
  if (!r || atomic_fetch_sub(&r->holders, 1) > 1) return;
  pthread_mutex_destroy(&r->lock);
  pthread_cond_destroy(&r->changed);
  free(r);
}

void sg_record_happen(struct record *r) {
  pthread_mutex_lock(&r->lock);
  r->done = true;
  r->at = now();
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

void sg_record_wait(struct record *r) {
  pthread_mutex_lock(&r->lock);
  while (!r->done) pthread_cond_wait(&r->changed, &r->lock);
  pthread_mutex_unlock(&r->lock);
}

bool sg_record_done(struct record *r) {
  pthread_mutex_lock(&r->lock);
  bool done = r->done;
  pthread_mutex_unlock(&r->lock);
  return done;
}

// ---- queues

struct queued {
  struct work work;
  struct queued *next;
};

static void *serve(void *argument) {
  struct CUstream_st *s = argument;
  sg_set_current(s->gpu);
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->head && !s->closed) pthread_cond_wait(&s->changed, &s->lock);
    struct queued *q = s->head;
    if (!q) break;
    s->head = q->next;
    if (!s->head) s->tail = NULL;
    pthread_mutex_unlock(&s->lock);
    sg_delay(s);
    sg_work_run(&q->work, s);
    sg_work_drop(&q->work);
    free(q);
    pthread_mutex_lock(&s->lock);
    s->finished++;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->lock);
  return NULL;
}

static void start(struct CUstream_st *s) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 4 << 20);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  if (pthread_create(&thread, &attributes, serve, s)) sg_fail("one more thread for a stream");
  pthread_attr_destroy(&attributes);
  s->started = true;
}

// append gives the number of the operation.
static unsigned long long append(struct CUstream_st *s, struct work work) {
  struct queued *q = malloc(sizeof *q);
  *q = (struct queued){work, NULL};
  pthread_mutex_lock(&s->lock);
  if (!s->started) start(s);
  if (s->tail)
    s->tail->next = q;
  else
    s->head = q;
  s->tail = q;
  unsigned long long number = ++s->queued;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  return number;
}

static bool idle(struct CUstream_st *s) {
  pthread_mutex_lock(&s->lock);
  bool done = s->finished == s->queued;
  pthread_mutex_unlock(&s->lock);
  return done;
}

// behind makes a stream wait for everything that is queued on another.
static void behind(struct CUstream_st *s, struct CUstream_st *other) {
  if (idle(other)) return;
  struct record *r = sg_record_new();
  append(other, (struct work){.kind = WORK_RECORD, .record = sg_record_hold(r)});
  append(s, (struct work){.kind = WORK_WAIT, .record = r});
}

// Stream 0 is in step with the streams that were not made with CU_STREAM_NON_BLOCKING: its work
// waits for theirs, and theirs for its.
static void keep_step(struct CUstream_st *s) {
  struct gpu *gpu = s->gpu;
  pthread_mutex_lock(&gpu->lock);
  if (s == gpu->legacy) {
    for (struct CUstream_st *other = gpu->streams; other; other = other->next)
      if (other != s && !(other->flags & CU_STREAM_NON_BLOCKING)) behind(s, other);
  } else if (gpu->legacy && !(s->flags & CU_STREAM_NON_BLOCKING)) {
    behind(s, gpu->legacy);
  }
  pthread_mutex_unlock(&gpu->lock);
}

CUresult sg_submit(struct CUstream_st *s, struct work work) {
  if (s->capture) return sg_capture_add(s, work);
  keep_step(s);
  append(s, work);
  return CUDA_SUCCESS;
}

// reach waits until an operation is done, and all before it.
static void reach(struct CUstream_st *s, unsigned long long number) {
  pthread_mutex_lock(&s->lock);
  while (s->finished < number) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
}

static unsigned long long queued(struct CUstream_st *s) {
  pthread_mutex_lock(&s->lock);
  unsigned long long number = s->queued;
  pthread_mutex_unlock(&s->lock);
  return number;
}

CUresult sg_submit_and_wait(struct CUstream_st *s, struct work work) {
  keep_step(s);
  reach(s, append(s, work));
  return sg_error(s->gpu);
}

void sg_finish(struct CUstream_st *s) { reach(s, queued(s)); }

// Streams may come and go meanwhile; one that was destroyed stays allocated.
void sg_finish_gpu(struct gpu *gpu) {
  enum { MOST = 4096 };
  struct { struct CUstream_st *stream; unsigned long long number; } list[MOST];
  size_t n = 0;
  pthread_mutex_lock(&gpu->lock);
  for (struct CUstream_st *s = gpu->streams; s; s = s->next) {
    if (n == MOST) sg_fail("more than %d streams", MOST);
    list[n].stream = s;
    list[n++].number = queued(s);
  }
  pthread_mutex_unlock(&gpu->lock);
  for (size_t i = 0; i < n; i++) reach(list[i].stream, list[i].number);
}

// ---- the life of streams

static struct CUstream_st *make(struct gpu *gpu, unsigned flags, int priority) {
  pthread_once(&delays_once, read_delays);
  struct CUstream_st *s = calloc(1, sizeof *s);
  s->gpu = gpu;
  s->flags = flags;
  s->priority = priority;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  s->id = ++gpu->made;
  s->random = delay_seed ^ (uint64_t)(gpu->ordinal + 1) << 40 ^ s->id << 20;
  s->next = gpu->streams;
  gpu->streams = s;
  return s;
}

CUresult sg_stream(CUstream handle, struct CUstream_st **stream) {
  if (handle == CU_STREAM_PER_THREAD) sg_fail("the default stream of a thread");
  struct CUstream_st *s = handle;
  if (handle == NULL || handle == CU_STREAM_LEGACY) {
    struct gpu *gpu = sg_current();
    if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&gpu->lock);
    if (!gpu->legacy) gpu->legacy = make(gpu, 0, 0);
    s = gpu->legacy;
    pthread_mutex_unlock(&gpu->lock);
  }
  if (s->closed) return CUDA_ERROR_INVALID_HANDLE;
  *stream = s;
  return sg_error(s->gpu);
}

#define STREAM(handle)                            \
  struct CUstream_st *s;                          \
  do {                                            \
    CUresult failed = sg_stream(handle, &s);      \
    if (failed) return failed;                    \
  } while (0)

SG_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  struct gpu *gpu = sg_current();
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  if (sg_error(gpu)) return sg_error(gpu);
  pthread_mutex_lock(&gpu->lock);
  *stream = make(gpu, flags, priority);
  pthread_mutex_unlock(&gpu->lock);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}

// Destroying a stream does not wait: its thread ends when the queue is empty. The handle stays
// allocated, so that a late use of it is an error and not a crash.
SG_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  STREAM(handle);
  if (s == s->gpu->legacy) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&s->gpu->lock);
  for (struct CUstream_st **at = &s->gpu->streams; *at; at = &(*at)->next)
    if (*at == s) {
      *at = s->next;
      break;
    }
  pthread_mutex_unlock(&s->gpu->lock);
  pthread_mutex_lock(&s->lock);
  s->closed = true;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  STREAM(handle);
  if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  sg_finish(s);
  return sg_error(s->gpu);
}

SG_EXPORT CUresult cuStreamQuery(CUstream handle) {
  STREAM(handle);
  if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return idle(s) ? sg_error(s->gpu) : CUDA_ERROR_NOT_READY;
}

SG_EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority) {
  STREAM(handle);
  *priority = s->priority;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
  STREAM(handle);
  *flags = s->flags;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
  STREAM(handle);
  *context = &s->gpu->context;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
  STREAM(handle);
  *device = s->gpu->ordinal;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
  STREAM(handle);
  *id = (unsigned long long)s->gpu->ordinal << 32 | s->id;
  return CUDA_SUCCESS;
}

// ---- host functions

// The function runs on the stream's thread, in the stream's order, and what is behind it waits. If
// the GPU has failed it is not called.
SG_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *data) {
  STREAM(handle);
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  return sg_submit(s, (struct work){.kind = WORK_HOST, .host = {fn, data}});
}

SG_EXPORT CUresult cuLaunchHostFunc_v2(CUstream handle, CUhostFn fn, void *data, unsigned mode) {
  (void)mode;  // how the host waits
  return cuLaunchHostFunc(handle, fn, data);
}

// The older interface is called on failure as well, and told of it.
SG_EXPORT CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback fn, void *data,
                                       unsigned flags) {
  STREAM(handle);
  if (flags || !fn) return CUDA_ERROR_INVALID_VALUE;
  if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return sg_submit(s, (struct work){.kind = WORK_CALLBACK, .callback = {fn, handle, data}});
}

// ---- events

SG_EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags) {
  struct gpu *gpu = sg_current();
  if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
  if (sg_error(gpu)) return sg_error(gpu);
  CUevent e = calloc(1, sizeof *e);
  e->gpu = gpu;
  e->flags = flags;
  pthread_mutex_init(&e->lock, NULL);
  *event = e;
  return CUDA_SUCCESS;
}

// An event may be destroyed while it is waited for: who waits holds the record.
SG_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  sg_record_drop(event->latest);
  free(event->frontier);
  pthread_mutex_destroy(&event->lock);
  free(event);
  return CUDA_SUCCESS;
}

// Recording again gives the event a new record. Waits that were called before keep the old one:
// they neither wait for the new work nor are released by it.
SG_EXPORT CUresult cuEventRecord(CUevent event, CUstream handle) {
  STREAM(handle);
  if (event->gpu != s->gpu) return CUDA_ERROR_INVALID_HANDLE;  // event and stream: one context
  if (s->capture) {
    pthread_mutex_lock(&event->lock);
    event->capture = s->capture;
    sg_frontier(&event->frontier, &event->frontier_count, s->frontier, s->frontier_count);
    pthread_mutex_unlock(&event->lock);
    return CUDA_SUCCESS;
  }
  struct record *fresh = sg_record_new();
  pthread_mutex_lock(&event->lock);
  struct record *old = event->latest;
  event->latest = sg_record_hold(fresh);
  event->capture = NULL;
  CUresult result = sg_submit(s, (struct work){.kind = WORK_RECORD, .record = fresh});
  pthread_mutex_unlock(&event->lock);
  sg_record_drop(old);
  return result;
}

SG_EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  if (flags) sg_fail("cuEventRecordWithFlags with flags %u", flags);
  return cuEventRecord(event, handle);
}

// latest takes hold of the record that counts now; an event that was never recorded has none, and
// counts as done.
static CUresult latest(CUevent event, struct record **record) {
  pthread_mutex_lock(&event->lock);
  bool captured = event->capture != NULL;
  *record = captured ? NULL : sg_record_hold(event->latest);
  pthread_mutex_unlock(&event->lock);
  return captured ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

// The stream waits for the record that is the latest now, at the call, whatever is recorded later.
// The event may be of another GPU.
SG_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  STREAM(handle);
  if (flags) sg_fail("cuStreamWaitEvent with flags %u", flags);
  pthread_mutex_lock(&event->lock);
  struct capture *capture = event->capture;
  CUresult result = CUDA_SUCCESS;
  if (capture || s->capture) {
    // A stream that waits for an event of a capture joins the capture.
    if (!capture)
      result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    else if (capture->invalid)
      result = CUDA_ERROR_CAPTURED_EVENT;
    else if (s->capture && s->capture != capture)
      result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    else
      sg_capture_join(s, capture, event->frontier, event->frontier_count);
  }
  struct record *record = sg_record_hold(event->latest);
  pthread_mutex_unlock(&event->lock);
  if (capture || s->capture || !record) {
    sg_record_drop(record);
    return result;
  }
  return sg_submit(s, (struct work){.kind = WORK_WAIT, .record = record});
}

SG_EXPORT CUresult cuEventQuery(CUevent event) {
  struct record *record;
  CUresult result = latest(event, &record);
  if (result) return result;
  bool done = !record || sg_record_done(record);
  sg_record_drop(record);
  return done ? sg_error(event->gpu) : CUDA_ERROR_NOT_READY;
}

SG_EXPORT CUresult cuEventSynchronize(CUevent event) {
  struct record *record;
  CUresult result = latest(event, &record);
  if (result) return result;
  if (record) sg_record_wait(record);
  sg_record_drop(record);
  return sg_error(event->gpu);
}

// Times are those of this machine. No test may compare them with anything.
SG_EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
  if ((begin->flags | end->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
  struct record *first, *last;
  CUresult result = latest(begin, &first);
  if (result) return result;
  if ((result = latest(end, &last))) {
    sg_record_drop(first);
    return result;
  }
  if (!first || !last)
    result = CUDA_ERROR_INVALID_HANDLE;
  else if (!sg_record_done(first) || !sg_record_done(last))
    result = CUDA_ERROR_NOT_READY;
  else
    *milliseconds = (float)(last->at - first->at);
  sg_record_drop(first);
  sg_record_drop(last);
  return result;
}

SG_EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent begin, CUevent end) {
  return cuEventElapsedTime(milliseconds, begin, end);
}
