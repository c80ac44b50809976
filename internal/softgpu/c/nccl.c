// The interface of the software NCCL: communicators and calls. nccl_launch.c runs them.
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "softnccl.h"

// ---- versions and errors

SG_EXPORT int ncclGetVersion(int *version) {
  *version = NCCL_VERSION;
  return NCCL_OK;
}

SG_EXPORT const char *ncclGetErrorString(int result) {
  static const char *const texts[] = {
      "no error", "error of the driver", "system error", "internal error", "invalid argument",
      "invalid usage", "remote error", "in progress",
  };
  return result >= 0 && result <= NCCL_IN_PROGRESS ? texts[result] : "unknown result";
}

SG_EXPORT const char *ncclGetLastError(nccl_comm comm) {
  (void)comm;
  return "";  // errors of the software NCCL end the process
}

// XLA asks for optional properties (one-sided access and the like) and does without.
SG_EXPORT int ncclCommQueryProperties(nccl_comm comm, void *properties) {
  (void)comm, (void)properties;
  return NCCL_INVALID_USAGE;
}

// ---- a communicator's life

SG_EXPORT int ncclGetUniqueId(nccl_id *id) {
  static _Atomic int made;
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) return NCCL_SYSTEM_ERROR;
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "softnccl-%d-%016lx-%d", getpid(), random, made++);
  return NCCL_OK;
}

static nccl_comm new_comm(const char *id, int ranks, int rank, int blocking) {
  nccl_comm comm = calloc(1, sizeof *comm);
  snprintf(comm->id, sizeof comm->id, "%s", id);
  comm->ranks = ranks;
  comm->rank = rank;
  comm->blocking = blocking;
  comm->holders = 1;
  comm->file = -1;
  pthread_mutex_init(&comm->settling, 0);
  pthread_mutex_init(&comm->lock, 0);
  pthread_cond_init(&comm->changed, 0);
  if (cuCtxGetDevice(&comm->device)) comm->device = 0;
  return comm;
}

void comm_hold(nccl_comm comm) {
  pthread_mutex_lock(&comm->lock);
  comm->holders++;
  pthread_mutex_unlock(&comm->lock);
}

void comm_release(nccl_comm comm) {
  pthread_mutex_lock(&comm->lock);
  int holders = --comm->holders;
  pthread_mutex_unlock(&comm->lock);
  if (holders) return;
  if (comm->board) board_leave(comm->board, comm->rank);
  for (int i = 0; i < 2; i++) {
    free(comm->sent[i]);
    free(comm->received[i]);
  }
  free(comm);
}

// take_seat joins the board, once id, rank and ranks are known.
static void take_seat(nccl_comm comm) {
  for (int i = 0; i < 2; i++) {
    comm->sent[i] = calloc((size_t)comm->ranks, sizeof *comm->sent[i]);
    comm->received[i] = calloc((size_t)comm->ranks, sizeof *comm->received[i]);
  }
  comm->board = board_join(comm->id, comm->ranks, comm->rank);
  comm->stage = JOINING;
}

// choice is what a rank says in a split.
struct choice {
  int color, key;
};

// divide ends a split when all ranks of the parent have chosen: ranks of one color, ordered by key
// and then by their rank in the parent, become a communicator.
static int divide(nccl_comm comm, int wait) {
  nccl_comm parent = comm->parent;
  struct board *board = parent->board;
  double deadline = board_deadline();
  board_lock(board);
  while (!comm->meeting->done) {
    if (comm->aborted || parent->aborted || !wait) {
      board_unlock(board);
      return wait ? NCCL_REMOTE_ERROR : NCCL_IN_PROGRESS;
    }
    if (board_wait(board, deadline)) board_hang(board, comm->meeting, parent->rank);
  }
  board_unlock(board);

  struct choice choices[MAX_RANKS];
  file_read(comm->file, choices, (size_t)parent->ranks * sizeof *choices, 0);
  close(comm->file);
  comm->file = -1;
  for (int r = 0; r < parent->ranks; r++) {
    if (choices[r].color != comm->color) continue;
    comm->ranks++;
    if (choices[r].key < comm->key || (choices[r].key == comm->key && r < parent->rank))
      comm->rank++;
  }
  snprintf(comm->id, sizeof comm->id, "%.90s.%lu.%d", parent->id, comm->meeting->key.number,
           comm->color);
  board_lock(board);
  board_part(comm->meeting);
  board_unlock(board);
  comm->meeting = 0;
  comm->parent = 0;
  comm_release(parent);
  take_seat(comm);
  return NCCL_OK;
}

// gather_ranks waits until all ranks have joined.
static int gather_ranks(nccl_comm comm, int wait) {
  struct board *board = comm->board;
  double deadline = board_deadline();
  int result = NCCL_OK;
  board_lock(board);
  while (board->memory->joined < comm->ranks && result == NCCL_OK) {
    if (comm->aborted) {
      result = NCCL_REMOTE_ERROR;
    } else if (!wait) {
      result = NCCL_IN_PROGRESS;
    } else if (board_wait(board, deadline)) {
      board_hang(board, 0, comm->rank);
    }
  }
  board_unlock(board);
  if (result == NCCL_OK) comm->stage = READY;
  return result;
}

int comm_settle(nccl_comm comm, int wait) {
  if (comm->stage == READY) return NCCL_OK;
  pthread_mutex_lock(&comm->settling);
  int result = NCCL_OK;
  if (comm->stage == SPLITTING) result = divide(comm, wait);
  if (result == NCCL_OK && comm->stage == JOINING) result = gather_ranks(comm, wait);
  pthread_mutex_unlock(&comm->settling);
  return result;
}

// finish_comm ends a call that makes a communicator: it waits, unless the call is in a group (the
// end of the group waits) or the communicator does not block.
static int finish_comm(nccl_comm comm) {
  if (group_depth()) return group_add_comm(comm);
  return comm->blocking ? comm_settle(comm, 1) : NCCL_IN_PROGRESS;
}

static int blocks(const struct nccl_config *config) { return !config || config->blocking != 0; }

SG_EXPORT int ncclCommInitRankConfig(nccl_comm *out, int ranks, nccl_id id, int rank,
                                     const struct nccl_config *config) {
  *out = 0;
  if (ranks < 1 || rank < 0 || rank >= ranks) return NCCL_INVALID_ARGUMENT;
  if (strncmp(id.text, "softnccl-", 9)) return NCCL_INVALID_ARGUMENT;
  nccl_comm comm = new_comm(id.text, ranks, rank, blocks(config));
  sg_log("nccl: communicator %s, rank %d of %d, GPU %d", comm->id, rank, ranks, comm->device);
  take_seat(comm);
  *out = comm;
  return finish_comm(comm);
}

SG_EXPORT int ncclCommInitRank(nccl_comm *out, int ranks, nccl_id id, int rank) {
  return ncclCommInitRankConfig(out, ranks, id, rank, 0);
}

SG_EXPORT int ncclCommInitRankScalable(nccl_comm *out, int ranks, int rank, int ids,
                                       const nccl_id *id, const struct nccl_config *config) {
  if (ids < 1) return NCCL_INVALID_ARGUMENT;
  return ncclCommInitRankConfig(out, ranks, id[0], rank, config);
}

SG_EXPORT int ncclCommInitAll(nccl_comm *out, int devices, const int *list) {
  nccl_id id;
  int result = ncclGetUniqueId(&id);
  if (result != NCCL_OK) return result;
  for (int i = 0; i < devices; i++) {
    out[i] = new_comm(id.text, devices, i, 1);
    out[i]->device = list ? list[i] : i;
    take_seat(out[i]);
  }
  for (int i = 0; i < devices; i++)
    if ((result = finish_comm(out[i])) != NCCL_OK) return result;
  return NCCL_OK;
}

SG_EXPORT int ncclCommSplit(nccl_comm parent, int color, int key, nccl_comm *out,
                            const struct nccl_config *config) {
  *out = 0;
  int result = comm_settle(parent, 1);
  if (result != NCCL_OK) return result;
  struct choice mine = {color, key};
  struct key where = {.numbering = BY_SPLIT, .from = -1, .to = -1, .number = parent->splits++};
  struct call call = {.kind = SPLIT, .type = NCCL_I32, .op = -1, .root = -1, .count = 2};
  struct board *board = parent->board;
  board_lock(board);
  struct meeting *m = board_meet(board, &where, &call, parent->rank, parent->ranks);
  uint64_t serial = m->serial;
  board_unlock(board);
  int file = board_file(board, serial);
  file_write(file, &mine, sizeof mine, (size_t)parent->rank * sizeof mine);
  board_lock(board);
  if (board_arrive(board, m, parent->rank)) m->done = 1;
  board_wake(board);
  if (color < 0) board_part(m);  // this rank wants no communicator
  board_unlock(board);
  if (color < 0) {
    close(file);
    return NCCL_OK;
  }
  nccl_comm comm = new_comm("", 0, 0, config ? blocks(config) : parent->blocking);
  comm->device = parent->device;
  comm->parent = parent;
  comm_hold(parent);
  comm->meeting = m;
  comm->file = file;
  comm->color = color;
  comm->key = key;
  *out = comm;
  return finish_comm(comm);
}

// drain waits until what is queued has run.
static void drain(nccl_comm comm) {
  pthread_mutex_lock(&comm->lock);
  while (comm->turn < comm->issued && !comm->aborted)
    pthread_cond_wait(&comm->changed, &comm->lock);
  pthread_mutex_unlock(&comm->lock);
}

SG_EXPORT int ncclCommFinalize(nccl_comm comm) {
  if (!comm) return NCCL_INVALID_ARGUMENT;
  drain(comm);
  return NCCL_OK;
}

static void end(nccl_comm comm) {
  pthread_mutex_lock(&comm->lock);
  comm->destroyed = 1;
  pthread_mutex_unlock(&comm->lock);
  comm_release(comm);
}

SG_EXPORT int ncclCommDestroy(nccl_comm comm) {
  if (!comm) return NCCL_OK;
  drain(comm);
  end(comm);
  return NCCL_OK;
}

static void wake(struct board *board) {
  if (!board) return;
  board_lock(board);
  board_wake(board);
  board_unlock(board);
}

// ncclCommAbort makes all that waits in this rank return. What it was to write is not written; the
// other ranks go on waiting until they abort too.
SG_EXPORT int ncclCommAbort(nccl_comm comm) {
  if (!comm) return NCCL_OK;
  sg_log("nccl: communicator %s, rank %d aborts", comm->id, comm->rank);
  comm->aborted = 1;
  while (pthread_mutex_trylock(&comm->settling)) {  // it waits for others to make the communicator
    if (comm->stage == SPLITTING && comm->parent) wake(comm->parent->board);
    wake(comm->board);
    usleep(1000);
  }
  pthread_mutex_unlock(&comm->settling);
  pthread_mutex_lock(&comm->lock);
  pthread_cond_broadcast(&comm->changed);
  pthread_mutex_unlock(&comm->lock);
  wake(comm->board);
  end(comm);
  return NCCL_OK;
}

SG_EXPORT int ncclCommGetAsyncError(nccl_comm comm, int *result) {
  if (!comm) return NCCL_INVALID_ARGUMENT;
  *result = comm_settle(comm, 0);
  return NCCL_OK;
}

SG_EXPORT int ncclCommCount(nccl_comm comm, int *count) {
  if (!comm) return NCCL_INVALID_ARGUMENT;
  int result = comm_settle(comm, 1);
  *count = comm->ranks;
  return result;
}

SG_EXPORT int ncclCommUserRank(nccl_comm comm, int *rank) {
  if (!comm) return NCCL_INVALID_ARGUMENT;
  int result = comm_settle(comm, 1);
  *rank = comm->rank;
  return result;
}

SG_EXPORT int ncclCommCuDevice(nccl_comm comm, int *device) {
  if (!comm) return NCCL_INVALID_ARGUMENT;
  *device = comm->device;
  return NCCL_OK;
}

// ---- memory: every address can be used, registered or not

SG_EXPORT int ncclMemAlloc(void **address, size_t bytes) {
  unsigned long long at = 0;
  int result = cuMemAlloc_v2(&at, bytes);
  *address = (void *)(uintptr_t)at;
  return result ? NCCL_CUDA_ERROR : NCCL_OK;
}

SG_EXPORT int ncclMemFree(void *address) {
  return cuMemFree_v2((unsigned long long)(uintptr_t)address) ? NCCL_CUDA_ERROR : NCCL_OK;
}

SG_EXPORT int ncclCommRegister(nccl_comm comm, void *address, size_t bytes, void **handle) {
  (void)comm, (void)bytes;
  *handle = address;
  return NCCL_OK;
}

SG_EXPORT int ncclCommDeregister(nccl_comm comm, void *handle) {
  (void)comm, (void)handle;
  return NCCL_OK;
}

// ---- calls

SG_EXPORT int ncclAllReduce(const void *in, void *out, size_t count, int type, int op,
                            nccl_comm comm, soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {ALL_REDUCE, type, op, -1, count}});
}

SG_EXPORT int ncclAllGather(const void *in, void *out, size_t count, int type, nccl_comm comm,
                            soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {ALL_GATHER, type, -1, -1, count}});
}

SG_EXPORT int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op,
                                nccl_comm comm, soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {REDUCE_SCATTER, type, op, -1, count}});
}

SG_EXPORT int ncclAlltoAll(const void *in, void *out, size_t count, int type, nccl_comm comm,
                           soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {ALL_TO_ALL, type, -1, -1, count}});
}

SG_EXPORT int ncclBroadcast(const void *in, void *out, size_t count, int type, int root,
                            nccl_comm comm, soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {BROADCAST, type, -1, root, count}});
}

SG_EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, nccl_comm comm,
                        soft_stream stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

SG_EXPORT int ncclReduce(const void *in, void *out, size_t count, int type, int op, int root,
                         nccl_comm comm, soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .out = out,
                                  .call = {REDUCE, type, op, root, count}});
}

SG_EXPORT int ncclSend(const void *in, size_t count, int type, int peer, nccl_comm comm,
                       soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .in = in, .sends = 1,
                                  .call = {POINT_TO_POINT, type, -1, peer, count}});
}

SG_EXPORT int ncclRecv(void *out, size_t count, int type, int peer, nccl_comm comm,
                       soft_stream stream) {
  return launch_add((struct work){.comm = comm, .stream = stream, .out = out,
                                  .call = {POINT_TO_POINT, type, -1, peer, count}});
}
