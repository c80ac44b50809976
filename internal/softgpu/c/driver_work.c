// What the operations of streams and the nodes of graphs do when their turn comes.
#include <stdlib.h>
#include <string.h>

#include "driver.h"

struct work sg_work_keep(const struct work *work) {
  struct work copy = *work;
  switch (work->kind) {
    case WORK_COPY: sg_staging_hold(copy.copy.staged); break;
    case WORK_KERNEL: sg_launch_hold(copy.launch); break;
    case WORK_RECORD:
    case WORK_WAIT: sg_record_hold(copy.record); break;
    case WORK_GRAPH: sg_snapshot_hold(copy.snapshot); break;
    default: break;
  }
  return copy;
}

void sg_work_drop(struct work *work) {
  switch (work->kind) {
    case WORK_COPY: sg_staging_drop(work->copy.staged); break;
    case WORK_KERNEL: sg_launch_drop(work->launch); break;
    case WORK_RECORD:
    case WORK_WAIT: sg_record_drop(work->record); break;
    case WORK_GRAPH: sg_snapshot_drop(work->snapshot); break;
    default: break;
  }
  work->kind = WORK_EMPTY;
}

static void fill(const struct work *w) {
  for (size_t row = 0; row < w->set.rows; row++) {
    char *to = (char *)w->set.to + row * w->set.pitch;
    if (w->set.width == 1) {
      memset(to, (int)w->set.value, w->set.columns);
      continue;
    }
    for (size_t i = 0; i < w->set.columns; i++)
      memcpy(to + i * w->set.width, &w->set.value, w->set.width);  // little endian
  }
}

static void store(const struct work *w) {
  if (w->write.width == 4)
    __atomic_store_n((uint32_t *)w->write.to, (uint32_t)w->write.value, __ATOMIC_SEQ_CST);
  else
    __atomic_store_n((uint64_t *)w->write.to, w->write.value, __ATOMIC_SEQ_CST);
}

// Once the GPU has failed nothing is computed any more, but whoever waits is released.
static bool runs_on_failed_gpu(enum work_kind kind) {
  return kind == WORK_RECORD || kind == WORK_WAIT || kind == WORK_CALLBACK || kind == WORK_FREE ||
         kind == WORK_GRAPH;
}

void sg_work_run(const struct work *work, struct CUstream_st *stream) {
  if (sg_error(stream->gpu) && !runs_on_failed_gpu(work->kind)) return;
  switch (work->kind) {
    case WORK_EMPTY: break;
    case WORK_COPY: memmove(work->copy.to, work->copy.from, work->copy.bytes); break;
    case WORK_SET: fill(work); break;
    case WORK_HOST: work->host.fn(work->host.data); break;
    case WORK_CALLBACK:
      work->callback.fn(work->callback.stream, sg_error(stream->gpu), work->callback.data);
      break;
    case WORK_KERNEL: sg_launch_run(work->launch, stream); break;
    case WORK_RECORD: sg_record_happen(work->record); break;
    case WORK_WAIT: sg_record_wait(work->record); break;
    case WORK_WRITE: store(work); break;
    case WORK_FREE: sg_memory_free(work->freed); break;
    case WORK_GRAPH: sg_snapshot_run(work->snapshot, stream); break;
  }
}
