// What the files of the driver share: GPUs, work, streams, graphs.
#ifndef SOFTGPU_DRIVER_H
#define SOFTGPU_DRIVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "common.h"
#include "ptx.h"
#include "softcuda.h"

struct gpu;

// The only context of a GPU is its primary one.
struct CUctx_st {
  struct gpu *gpu;
  atomic_int retained;
  unsigned flags;
};

struct gpu {
  int ordinal;  // as the process counts the GPUs that it sees
  int place;    // on the bus
  const struct sg_model *model;
  struct CUctx_st context;

  size_t memory, used;  // bytes; used is guarded by the lock of driver_memory.c

  // error is 0 until the GPU fails; from then on every call about the GPU gives it.
  atomic_int error;
  atomic_long launches;  // kernels run so far

  pthread_mutex_t lock;         // of the list of streams
  struct CUstream_st *streams;  // those that exist, linked by next
  struct CUstream_st *legacy;   // stream 0, made at its first use
  unsigned long long made;      // streams so far
};

// sg_gpu gives a GPU by its ordinal, or NULL. Settings are read at the first call of all.
struct gpu *sg_gpu(CUdevice device);

// sg_current is the GPU of the calling thread's context, or NULL.
struct gpu *sg_current(void);
void sg_set_current(struct gpu *gpu);

// sg_error is CUDA_SUCCESS, or what the GPU failed with.
CUresult sg_error(const struct gpu *gpu);

// ---- work: one operation of a stream, or one node of a graph

enum work_kind {
  WORK_EMPTY,
  WORK_COPY,      // bytes from one address to another
  WORK_SET,       // fill
  WORK_HOST,      // call a function of the program
  WORK_CALLBACK,  // the same with the older interface
  WORK_KERNEL,
  WORK_RECORD,  // an event happens
  WORK_WAIT,    // wait for an event's record
  WORK_WRITE,   // store one word
  WORK_FREE,    // give memory back to its pool
  WORK_GRAPH    // run a snapshot of a graph
};

struct work {
  enum work_kind kind;
  union {
    struct {
      void *to;
      const void *from;
      size_t bytes;
      struct staging *staged;  // the source's bytes as they were at the call, or NULL
    } copy;
    struct {
      void *to;
      unsigned value, width;  // width of an element: 1, 2 or 4 bytes
      size_t columns, rows, pitch;
    } set;
    struct {
      CUhostFn fn;
      void *data;
    } host;
    struct {
      CUstreamCallback fn;
      CUstream stream;
      void *data;
    } callback;
    struct launch *launch;
    struct record *record;
    struct {
      void *to;
      uint64_t value;
      unsigned width;
    } write;
    CUdeviceptr freed;
    struct snapshot *snapshot;
  };
};

// sg_work_keep makes a copy of a work that is dropped on its own; sg_work_drop releases what a work
// holds. What two copies share has a count of holders.
struct work sg_work_keep(const struct work *work);
void sg_work_drop(struct work *work);

// sg_work_run does a work on the thread of a stream.
void sg_work_run(const struct work *work, struct CUstream_st *stream);

// ---- streams and events

// A record is one call of cuEventRecord: it happens once, and is never taken back. An event points
// at its latest record; who waits holds the record that was the latest when the wait was called.
struct record {
  atomic_int holders;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool done;
  double at;  // ms
};

struct record *sg_record_new(void);
struct record *sg_record_hold(struct record *record);
void sg_record_drop(struct record *record);
void sg_record_happen(struct record *record);
void sg_record_wait(struct record *record);
bool sg_record_done(struct record *record);

struct CUstream_st {
  struct gpu *gpu;
  struct CUstream_st *next;
  unsigned flags;
  int priority;
  unsigned long long id;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct queued *head, *tail;
  unsigned long long queued, finished;  // operations so far
  bool started;
  atomic_bool closed;
  uint64_t random;  // state of the delays

  struct capture *capture;  // NULL, or the graph that calls go to instead of the queue
  CUgraphNode *frontier;    // nodes that the next captured one needs
  size_t frontier_count;
};

// sg_stream finds the stream that a handle means, and the error that it must answer with.
CUresult sg_stream(CUstream handle, struct CUstream_st **stream);

// sg_submit queues work, or adds it to the graph that the stream captures. It takes the work over.
CUresult sg_submit(struct CUstream_st *stream, struct work work);

// sg_submit_and_wait returns when the work is done, whatever was queued behind it meanwhile.
CUresult sg_submit_and_wait(struct CUstream_st *stream, struct work work);

// sg_finish waits until everything is done that was queued before the call.
void sg_finish(struct CUstream_st *stream);
void sg_finish_gpu(struct gpu *gpu);

// sg_delay sleeps as SOFTGPU_DELAY_SEED and SOFTGPU_SLOW say.
void sg_delay(struct CUstream_st *stream);

// sg_shuffled tells whether what is in no order is put into a random one; sg_random draws for it.
bool sg_shuffled(void);
uint64_t sg_random(struct CUstream_st *stream);

// ---- memory

enum memory_kind { MEMORY_PAGEABLE, MEMORY_PINNED, MEMORY_DEVICE };

// A block is a piece of memory that the driver knows. A range that is in none is the program's own,
// pageable.
struct block {
  uintptr_t start;
  size_t bytes;
  enum memory_kind kind;
  struct gpu *gpu;
  size_t charged;  // bytes of the GPU's memory
  bool owned;      // mapped by the driver, so that freeing unmaps
  bool mapped;     // a mapping of created memory
  bool shared;     // a file that other processes can open
  int file;        // if it is shared
  unsigned long long id;
};

// sg_poisoned maps memory that nobody has written, or gives NULL; sg_poison_file fills the first
// part of a memory file.
void *sg_poisoned(size_t bytes);
void sg_poison_file(int file, size_t bytes);

// sg_find gives the block that holds all of a range; pageable memory gives false.
bool sg_find(uintptr_t start, size_t bytes, struct block *found);

// sg_memory_lend makes the driver know memory that someone else owns, such as a module's variable.
void sg_memory_lend(void *start, size_t bytes, struct gpu *gpu);
void sg_memory_return(void *start);

// sg_memory_free gives memory back at once.
CUresult sg_memory_free(CUdeviceptr pointer);

// sg_shared tells whether cuMemAlloc gives memory that other processes can open; sg_share makes it,
// or gives NULL, and sg_unshare ends its file.
bool sg_shared(void);
void *sg_share(size_t bytes, int *file);
void sg_unshare(int file);

// ---- copies

struct staging;
void sg_staging_drop(struct staging *staging);
struct staging *sg_staging_hold(struct staging *staging);

// ---- kernels

struct launch;
struct launch *sg_launch_hold(struct launch *launch);
void sg_launch_drop(struct launch *launch);
void sg_launch_run(struct launch *launch, struct CUstream_st *stream);
// sg_launch_new checks the shape of a launch and copies its parameters.
CUresult sg_launch_new(struct launch **launch, CUfunction function, const unsigned grid[3],
                       const unsigned block[3], unsigned shared, void **params, void **extra);
struct gpu *sg_launch_gpu(const struct launch *launch);

// ---- graphs

struct snapshot *sg_snapshot_hold(struct snapshot *snapshot);
void sg_snapshot_drop(struct snapshot *snapshot);
void sg_snapshot_run(struct snapshot *snapshot, struct CUstream_st *stream);

// sg_capture_add adds work to the graph that a stream captures.
CUresult sg_capture_add(struct CUstream_st *stream, struct work work);

// sg_capture_join makes a stream part of a capture, behind the given nodes.
void sg_capture_join(struct CUstream_st *stream, struct capture *capture, const CUgraphNode *nodes,
                     size_t count);

// A capture is what the streams share that record calls into one graph.
struct capture {
  CUgraph graph;
  struct CUstream_st *origin;
  bool invalid;  // it has ended
  unsigned long long id;
};

struct CUevent_st {
  struct gpu *gpu;
  unsigned flags;
  pthread_mutex_t lock;
  struct record *latest;

  // If the latest record was captured: by which capture, behind which nodes.
  struct capture *capture;
  CUgraphNode *frontier;
  size_t frontier_count;
};

// sg_frontier replaces a list of nodes.
void sg_frontier(CUgraphNode **list, size_t *count, const CUgraphNode *nodes, size_t n);

#endif
