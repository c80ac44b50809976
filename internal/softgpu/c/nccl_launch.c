// How calls of the software NCCL become work of streams, and how that work runs.
//
// Calls outside a group, or all calls that a group makes on one communicator, are a launch. A launch
// gets its numbers when it is queued, in the order of the program's calls, and never when it runs:
// streams overtake each other, and ranks must agree on which call meets which. Launches of one
// communicator run one after another, as NCCL's kernels do, also on different streams. Data are
// read and written when the stream comes to the launch.
//
// A rank puts its data into the meeting's file and then needs its buffer no more; it reads the
// result from that file when all have come. So nobody reads another rank's memory, and no rank has
// to wait until a slow one has read. Messages are different: a send ends when it has been received,
// as NCCL documents, so that a program that would block there also blocks here.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "softnccl.h"

enum { MAX_STREAMS = 16 };  // of one communicator in one group

struct launch {
  nccl_comm comm;
  struct work *works;
  uint64_t ticket;  // its place among the launches of the communicator
  int captured;     // it belongs to a graph, which can run it again and again
  uint64_t replay;  // how often a captured launch has run

  // A group may use several streams with one communicator: all wait for each other, and then for
  // the work, which the last one does.
  soft_stream streams[MAX_STREAMS];
  int used;  // streams
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int arrived, through;
  uint64_t round;
};

// ---- delays

// delay sleeps for a random time, by SOFTGPU_DELAY_SEED: half of the time not at all, else for up to
// SOFTGPU_DELAY_US. Results must not depend on it.
static void delay(nccl_comm comm, uint64_t number, int place) {
  long long seed = sg_setting("SOFTGPU_DELAY_SEED", 0);
  if (!seed) return;
  uint64_t x = (uint64_t)seed;
  const uint64_t salt[] = {(uint64_t)comm->rank, number, (uint64_t)place, (uint64_t)getpid()};
  for (int i = 0; i < 4; i++) {  // splitmix64
    x += 0x9e3779b97f4a7c15 + salt[i];
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
  }
  if (x & 1) return;
  uint64_t limit = (uint64_t)sg_setting("SOFTGPU_DELAY_US", 1000);
  uint64_t micros = limit ? (x >> 8) % limit : 0;
  nanosleep(&(struct timespec){(time_t)(micros / 1000000), (long)(micros % 1000000) * 1000}, 0);
}

// ---- the work of one call

// given is the bytes that a rank puts down, and taken those that it takes away.
static size_t given(const struct work *w) {
  size_t bytes = w->call.count * nccl_width(w->call.type);
  int all = w->call.kind == REDUCE_SCATTER || w->call.kind == ALL_TO_ALL;
  return all ? bytes * (size_t)w->comm->ranks : bytes;
}

// reduce_all combines the data of all ranks, which lie one after another in the file, and puts the
// result behind them. The rank that came last does it for all; the order is that of ranks.
static void reduce_all(const struct work *w) {
  enum { PIECE = 1 << 14 };  // elements
  int ranks = w->comm->ranks;
  size_t width = nccl_width(w->call.type), each = given(w), piece = PIECE * width;
  char *memory = malloc(piece * (size_t)(ranks + 1));
  void *parts[MAX_RANKS];
  for (int r = 0; r < ranks; r++) parts[r] = memory + piece * (size_t)(r + 1);
  for (size_t at = 0; at < each; at += piece) {
    size_t bytes = each - at < piece ? each - at : piece;
    for (int r = 0; r < ranks; r++) file_read(w->file, parts[r], bytes, (size_t)r * each + at);
    nccl_reduce(memory, parts, ranks, bytes / width, w->call.type, w->call.op);
    file_write(w->file, memory, bytes, (size_t)ranks * each + at);
  }
  free(memory);
}

static int reduces(const struct work *w) { return w->call.op >= 0; }

static int messages(const struct work *w) { return w->call.kind == POINT_TO_POINT; }

// post puts the rank's data down and does not wait.
static void post(struct work *w, uint64_t replay) {
  nccl_comm comm = w->comm;
  struct board *board = comm->board;
  struct key key = w->key;
  key.replay = replay;
  board_lock(board);
  board->memory->seats[comm->rank].begun++;
  int expected = messages(w) ? 2 : comm->ranks;
  w->meeting = board_meet(board, &key, &w->call, comm->rank, expected);
  uint64_t serial = w->meeting->serial;
  board_unlock(board);

  w->file = board_file(board, serial);
  size_t bytes = given(w);
  if (messages(w) ? w->sends : w->call.kind == BROADCAST ? w->call.root == comm->rank : 0)
    file_write(w->file, w->in, bytes, 0);
  else if (!messages(w) && w->call.kind != BROADCAST)
    file_write(w->file, w->in, bytes, (size_t)comm->rank * bytes);

  board_lock(board);
  int last = board_arrive(board, w->meeting, comm->rank);
  if (last && reduces(w)) {
    board_unlock(board);
    reduce_all(w);
    board_lock(board);
  }
  if (last) {
    w->meeting->done = 1;
    board_wake(board);
  }
  board_unlock(board);
}

// take writes the rank's result from the meeting's file.
static void take(const struct work *w) {
  nccl_comm comm = w->comm;
  size_t rank = (size_t)comm->rank, ranks = (size_t)comm->ranks;
  size_t bytes = w->call.count * nccl_width(w->call.type), each = given(w);
  switch (w->call.kind) {
    case ALL_REDUCE:
      file_read(w->file, w->out, bytes, ranks * each);
      break;
    case REDUCE:
      if (comm->rank == w->call.root) file_read(w->file, w->out, bytes, ranks * each);
      break;
    case REDUCE_SCATTER:
      file_read(w->file, w->out, bytes, ranks * each + rank * bytes);
      break;
    case ALL_GATHER:
      file_read(w->file, w->out, ranks * bytes, 0);
      break;
    case ALL_TO_ALL:
      for (size_t r = 0; r < ranks; r++)
        file_read(w->file, (char *)w->out + r * bytes, bytes, r * each + rank * bytes);
      break;
    case BROADCAST:
    case POINT_TO_POINT:
      file_read(w->file, w->out, bytes, 0);
      break;
  }
}

// collect waits for the others and takes the result; a send waits until it has been received.
static void collect(struct work *w) {
  nccl_comm comm = w->comm;
  struct board *board = comm->board;
  struct meeting *m = w->meeting;
  double deadline = board_deadline();
  board_lock(board);
  while (!(m->done && (!w->sends || m->left)) && !comm->aborted)
    if (board_wait(board, deadline)) board_hang(board, m, comm->rank);
  int came = m->done && (!w->sends || m->left);
  board_unlock(board);
  if (came && !w->sends) take(w);
  close(w->file);
  if (!came) return;  // aborted: the meeting stays as it is, the others may still wait in it
  board_lock(board);
  board_part(m);
  if (messages(w)) board_wake(board);
  board_unlock(board);
}

// ---- the work of one launch

static void perform(struct launch *l) {
  nccl_comm comm = l->comm;
  uint64_t number = l->captured ? l->replay : l->ticket;
  delay(comm, number, 0);
  // All put their data down before the first one waits: calls of a group run at the same time.
  for (struct work *w = l->works; w; w = w->next) post(w, l->captured ? l->replay : 0);
  delay(comm, number, 1);
  for (struct work *w = l->works; w; w = w->next)
    if (!w->sends) collect(w);
  for (struct work *w = l->works; w; w = w->next)
    if (w->sends) collect(w);
  delay(comm, number, 2);
  l->replay++;
}

// in_turn runs a launch when those that were queued before it on its communicator are through.
static void in_turn(struct launch *l) {
  nccl_comm comm = l->comm;
  pthread_mutex_lock(&comm->lock);
  if (l->captured && comm->destroyed && !comm->aborted)
    nccl_fault("a graph runs a call on communicator %s, which has been destroyed", comm->id);
  while (!l->captured && comm->turn != l->ticket && !comm->aborted)
    pthread_cond_wait(&comm->changed, &comm->lock);
  pthread_mutex_unlock(&comm->lock);

  if (!comm->aborted) perform(l);

  if (l->captured) return;
  pthread_mutex_lock(&comm->lock);
  comm->turn++;
  pthread_cond_broadcast(&comm->changed);
  pthread_mutex_unlock(&comm->lock);
}

static void drop(struct launch *l) {
  comm_release(l->comm);
  for (struct work *w = l->works, *next; w; w = next) {
    next = w->next;
    free(w);
  }
  pthread_mutex_destroy(&l->lock);
  pthread_cond_destroy(&l->changed);
  free(l);
}

// run is what a stream calls.
static void run(void *argument) {
  struct launch *l = argument;
  pthread_mutex_lock(&l->lock);
  uint64_t round = l->round;
  if (++l->arrived == l->used) {
    pthread_mutex_unlock(&l->lock);
    in_turn(l);
    pthread_mutex_lock(&l->lock);
    l->arrived = 0;
    l->through = 0;
    l->round++;
    pthread_cond_broadcast(&l->changed);
  } else {
    while (l->round == round) pthread_cond_wait(&l->changed, &l->lock);
  }
  int last = ++l->through == l->used;
  pthread_mutex_unlock(&l->lock);
  if (last && !l->captured) drop(l);
}

// ---- groups

static _Thread_local struct {
  int depth;
  struct work *works, **end;
  struct { nccl_comm comm; } made[MAX_RANKS];  // communicators that the end of the group waits for
  int comms;
} group;

// number gives a work its key.
static void number(struct work *w, int numbering) {
  nccl_comm comm = w->comm;
  w->key = (struct key){.numbering = (uint32_t)numbering, .from = -1, .to = -1};
  if (!messages(w)) {
    w->key.number = comm->numbers[numbering]++;
    return;
  }
  int peer = w->call.root;
  w->call.root = -1;  // both sides must say the same
  w->key.from = w->sends ? comm->rank : peer;
  w->key.to = w->sends ? peer : comm->rank;
  w->key.number = (w->sends ? comm->sent : comm->received)[numbering][peer]++;
}

static int use_stream(struct launch *l, soft_stream stream) {
  for (int i = 0; i < l->used; i++)
    if (l->streams[i] == stream) return NCCL_OK;
  if (l->used == MAX_STREAMS) sg_fail("NCCL group with more than %d streams", MAX_STREAMS);
  if (soft_captures(stream) != l->captured) return NCCL_INVALID_USAGE;
  l->streams[l->used++] = stream;
  return NCCL_OK;
}

// queue makes a launch of all works of a communicator and gives it to its streams.
static int queue(nccl_comm comm, struct work *works) {
  struct launch *l = calloc(1, sizeof *l);
  l->comm = comm;
  l->works = works;
  l->captured = soft_captures(works->stream);
  pthread_mutex_init(&l->lock, 0);
  pthread_cond_init(&l->changed, 0);
  int result = NCCL_OK;
  for (struct work *w = works; w && result == NCCL_OK; w = w->next)
    result = use_stream(l, w->stream);
  if (result != NCCL_OK) {
    comm_hold(comm);
    drop(l);
    return result;
  }
  pthread_mutex_lock(&comm->lock);
  comm->holders++;
  for (struct work *w = works; w; w = w->next) number(w, l->captured ? BY_CAPTURE : BY_CALL);
  if (!l->captured) l->ticket = comm->issued++;
  pthread_mutex_unlock(&comm->lock);
  if (l->captured) sg_log("nccl: captured calls of communicator %s, rank %d", comm->id, comm->rank);
  // The launch may be over and gone as soon as its last stream has it.
  soft_stream streams[MAX_STREAMS];
  int used = l->used;
  memcpy(streams, l->streams, sizeof streams);
  for (int i = 0; i < used; i++)
    if (cuLaunchHostFunc(streams[i], run, l)) return NCCL_CUDA_ERROR;
  return NCCL_OK;
}

// flush queues what the group has gathered, one launch for each communicator in the order of their
// first calls.
static int flush(void) {
  int result = NCCL_OK;
  for (int i = 0; i < group.comms; i++) {
    nccl_comm comm = group.made[i].comm;
    int one = comm->blocking ? comm_settle(comm, 1) : NCCL_IN_PROGRESS;
    if (result == NCCL_OK) result = one;
  }
  group.comms = 0;
  while (group.works) {
    nccl_comm comm = group.works->comm;
    struct work *mine = 0, **to = &mine, *rest = 0, **other = &rest;
    for (struct work *w = group.works, *next; w; w = next) {
      next = w->next;
      w->next = 0;
      struct work ***list = w->comm == comm ? &to : &other;
      **list = w;
      *list = &w->next;
    }
    group.works = rest;
    int one = queue(comm, mine);
    if (result == NCCL_OK) result = one;
  }
  group.end = 0;
  return result;
}

int group_depth(void) { return group.depth; }

int group_add_comm(nccl_comm comm) {
  if (group.comms == MAX_RANKS) sg_fail("NCCL group that makes more than %d communicators", MAX_RANKS);
  group.made[group.comms++].comm = comm;
  return NCCL_OK;
}

SG_EXPORT int ncclGroupStart(void) {
  group.depth++;
  return NCCL_OK;
}

SG_EXPORT int ncclGroupEnd(void) {
  if (group.depth == 0) return NCCL_INVALID_USAGE;
  return --group.depth == 0 ? flush() : NCCL_OK;
}

// check refuses what the call cannot be; a type or a reduction that is not known ends the process.
static int check(const struct work *w) {
  if (!w->comm) return NCCL_INVALID_ARGUMENT;
  if (!nccl_type_name(w->call.type)) sg_fail("NCCL data type %d", w->call.type);
  if (w->call.kind == ALL_REDUCE || w->call.kind == REDUCE || w->call.kind == REDUCE_SCATTER)
    if (!nccl_op_name(w->call.op)) sg_fail("NCCL reduction %d", w->call.op);
  int result = comm_settle(w->comm, 1);
  if (result != NCCL_OK) return result;
  int rooted = w->call.kind == BROADCAST || w->call.kind == REDUCE || messages(w);
  if (rooted && (w->call.root < 0 || w->call.root >= w->comm->ranks)) return NCCL_INVALID_ARGUMENT;
  return NCCL_OK;
}

int launch_add(struct work work) {
  int result = check(&work);
  if (result != NCCL_OK) return result;
  struct work *w = malloc(sizeof *w);
  *w = work;
  if (!group.works) group.end = &group.works;
  *group.end = w;
  group.end = &w->next;
  return group.depth ? NCCL_OK : flush();
}
