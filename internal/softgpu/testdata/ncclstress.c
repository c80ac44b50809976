// Random sequences of NCCL calls on random streams of random communicators, checked element by
// element. Every rank makes the same random choices. Inputs are written by the stream just before
// the call and overwritten right after it, as a program that reuses memory would: a library that
// reads too early, too late, or in another order than that of the calls gives wrong numbers.
//
// ncclstress FILE RANKS FIRST HERE ROUNDS SEED: plays ranks FIRST to FIRST+HERE-1 of RANKS in
// threads; rank 0's process writes the communicator's id to FILE, the others read it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct CUstream_st *stream;
typedef struct nccl_comm *comm;
typedef struct { char text[128]; } id;

int cuStreamCreate(stream *, unsigned);
int cuStreamSynchronize(stream);
int cuStreamDestroy_v2(stream);
int cuLaunchHostFunc(stream, void (*)(void *), void *);
int ncclGetUniqueId(id *);
int ncclCommInitRank(comm *, int, id, int);
int ncclCommSplit(comm, int, int, comm *, void *);
int ncclCommCount(comm, int *);
int ncclCommUserRank(comm, int *);
int ncclCommDestroy(comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, comm, stream);
int ncclAllGather(const void *, void *, size_t, int, comm, stream);
int ncclReduceScatter(const void *, void *, size_t, int, int, comm, stream);
int ncclAlltoAll(const void *, void *, size_t, int, comm, stream);
int ncclBroadcast(const void *, void *, size_t, int, int, comm, stream);
int ncclReduce(const void *, void *, size_t, int, int, int, comm, stream);
int ncclSend(const void *, size_t, int, int, comm, stream);
int ncclRecv(void *, size_t, int, int, comm, stream);

enum { STREAMS = 3, COMMS = 3, SLOTS = 4, MAX_COUNT = 300, MAX_RANKS = 16 };
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, SHIFT, KINDS };

static const char *const kind_names[] = {"all-reduce", "all-gather", "reduce-scatter",
                                         "all-to-all", "broadcast",  "reduce", "shift"};
static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // of NCCL's types, by number

static int ranks, rounds, first_rank;
static uint64_t seed;
static id world_id;

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  _exit(1);
}

#define MUST(call)                                              \
  do {                                                          \
    int result_ = (call);                                       \
    if (result_) die("%s gave %d", #call, result_);             \
  } while (0)

static uint64_t next(uint64_t *state) {  // splitmix64
  uint64_t x = *state += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

static int below(uint64_t *state, int n) { return (int)(next(state) % (uint64_t)n); }

// ---- numbers

static float from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static double load(const void *p, int type, size_t i) {
  switch (type) {
    case 0: return ((const int8_t *)p)[i];
    case 1: return ((const uint8_t *)p)[i];
    case 2: return ((const int32_t *)p)[i];
    case 3: return ((const uint32_t *)p)[i];
    case 4: return (double)((const int64_t *)p)[i];
    case 5: return (double)((const uint64_t *)p)[i];
    case 6: return (double)((const _Float16 *)p)[i];
    case 7: return ((const float *)p)[i];
    case 8: return ((const double *)p)[i];
    default: return from_bits((uint32_t)((const uint16_t *)p)[i] << 16);
  }
}

static void store(void *p, int type, size_t i, double v) {
  float f = (float)v;
  uint32_t bits;
  switch (type) {
    case 0: ((int8_t *)p)[i] = (int8_t)(int64_t)v; break;
    case 1: ((uint8_t *)p)[i] = (uint8_t)(int64_t)v; break;
    case 2: ((int32_t *)p)[i] = (int32_t)v; break;
    case 3: ((uint32_t *)p)[i] = (uint32_t)v; break;
    case 4: ((int64_t *)p)[i] = (int64_t)v; break;
    case 5: ((uint64_t *)p)[i] = (uint64_t)v; break;
    case 6: ((_Float16 *)p)[i] = (_Float16)f; break;
    case 7: ((float *)p)[i] = f; break;
    case 8: ((double *)p)[i] = v; break;
    default:  // values here have few bits: nothing is rounded
      memcpy(&bits, &f, 4);
      ((uint16_t *)p)[i] = (uint16_t)(bits >> 16);
  }
}

// ---- one call of one rank

struct job {
  int step, kind, type, op, count, root, rank, n, shift;  // rank and n: in the communicator
  int members[MAX_RANKS];                                 // world ranks of the communicator
  char *in, *out;
  comm c;
  stream s;
};

// element is what rank r of the world gives at i: small, so that every type holds every result.
// A product has only ones and twos, because 3 to the power of 7 has too many bits for bf16.
static double element(const struct job *j, int r, size_t i) {
  uint64_t x = (uint64_t)j->step * 1000003 + (uint64_t)r * 7919 + i;
  return (double)(next(&x) % (j->op == 1 ? 2 : 3) + 1);
}

static size_t in_count(const struct job *j) {
  int all = j->kind == REDUCE_SCATTER || j->kind == ALL_TO_ALL;
  return (size_t)j->count * (size_t)(all ? j->n : 1);
}

static size_t out_count(const struct job *j) {
  int all = j->kind == ALL_GATHER || j->kind == ALL_TO_ALL;
  return (size_t)j->count * (size_t)(all ? j->n : 1);
}

static void fill(void *argument) {
  struct job *j = argument;
  for (size_t i = 0; i < in_count(j); i++)
    store(j->in, j->type, i, element(j, j->members[j->rank], i));
}

static double reduced(const struct job *j, size_t i) {
  double a = element(j, j->members[0], i);
  for (int r = 1; r < j->n; r++) {
    double b = element(j, j->members[r], i);
    a = j->op == 1 ? a * b : j->op == 2 ? (a > b ? a : b) : j->op == 3 ? (a < b ? a : b) : a + b;
  }
  if (j->op == 4) a /= j->n;
  char wrapped[8];  // products wrap in 8 bits
  store(wrapped, j->type, 0, a);
  return load(wrapped, j->type, 0);
}

static double expected(const struct job *j, size_t i) {
  size_t count = (size_t)j->count, from = i / count, at = i % count;
  switch (j->kind) {
    case ALL_REDUCE:
    case REDUCE: return reduced(j, i);
    case REDUCE_SCATTER: return reduced(j, (size_t)j->rank * count + i);
    case ALL_GATHER: return element(j, j->members[from], at);
    case ALL_TO_ALL: return element(j, j->members[from], (size_t)j->rank * count + at);
    case BROADCAST: return element(j, j->members[j->root], i);
    default: return element(j, j->members[(j->rank + j->n - j->shift) % j->n], i);
  }
}

// check compares and then spoils both buffers.
static void check(void *argument) {
  struct job *j = argument;
  size_t n = out_count(j);
  if (j->kind == REDUCE && j->rank != j->root) n = 0;
  for (size_t i = 0; i < n; i++) {
    double want = expected(j, i), got = load(j->out, j->type, i);
    if (want != got)
      die("step %d: %s of %d x type %d op %d on rank %d of %d: element %zu is %g, not %g",
          j->step, kind_names[j->kind], j->count, j->type, j->op, j->rank, j->n, i, got, want);
  }
  memset(j->in, 0x55, in_count(j) * widths[j->type]);
  memset(j->out, 0x55, out_count(j) * widths[j->type]);
  free(j);
}

static void call(struct job *j) {
  size_t count = (size_t)j->count;
  switch (j->kind) {
    case ALL_REDUCE: MUST(ncclAllReduce(j->in, j->out, count, j->type, j->op, j->c, j->s)); break;
    case ALL_GATHER: MUST(ncclAllGather(j->in, j->out, count, j->type, j->c, j->s)); break;
    case REDUCE_SCATTER:
      MUST(ncclReduceScatter(j->in, j->out, count, j->type, j->op, j->c, j->s));
      break;
    case ALL_TO_ALL: MUST(ncclAlltoAll(j->in, j->out, count, j->type, j->c, j->s)); break;
    case BROADCAST: MUST(ncclBroadcast(j->in, j->out, count, j->type, j->root, j->c, j->s)); break;
    case REDUCE: MUST(ncclReduce(j->in, j->out, count, j->type, j->op, j->root, j->c, j->s)); break;
    default:
      MUST(ncclGroupStart());
      MUST(ncclSend(j->in, count, j->type, (j->rank + j->shift) % j->n, j->c, j->s));
      MUST(ncclRecv(j->out, count, j->type, (j->rank + j->n - j->shift) % j->n, j->c, j->s));
      MUST(ncclGroupEnd());
  }
}

// ---- one rank

struct player {
  int rank;
  comm comms[COMMS];
  int size[COMMS], self[COMMS], members[COMMS][MAX_RANKS];
  stream streams[STREAMS];
  char *memory;
};

// draw makes the choices of one call; all ranks draw the same.
static struct job *draw(struct player *p, uint64_t *state, int step, int slot, int which) {
  struct job *j = calloc(1, sizeof *j);
  j->step = step;
  j->kind = below(state, KINDS);
  j->type = below(state, 10);
  j->op = below(state, j->type >= 6 && !(p->size[which] & (p->size[which] - 1)) ? 5 : 4);
  j->count = below(state, MAX_COUNT) + 1;
  j->n = p->size[which];
  j->rank = p->self[which];
  j->c = p->comms[which];
  memcpy(j->members, p->members[which], sizeof j->members);
  int stream_at = below(state, STREAMS), root = below(state, 1 << 20), shift = below(state, 1 << 20);
  j->root = root % j->n;
  j->shift = shift % j->n;
  j->s = p->streams[stream_at];
  size_t room = (size_t)MAX_COUNT * MAX_RANKS * 8;
  j->in = p->memory + room * (size_t)((stream_at * SLOTS + slot) * 2);
  int in_place = below(state, 3) == 0 && (j->kind == ALL_REDUCE || j->kind == BROADCAST);
  j->out = in_place ? j->in : j->in + room;
  return j;
}

static void split(struct player *p, int at, int color, int key) {
  MUST(ncclCommSplit(p->comms[0], color, key, &p->comms[at], 0));
  MUST(ncclCommCount(p->comms[at], &p->size[at]));
  MUST(ncclCommUserRank(p->comms[at], &p->self[at]));
}

static void setup(struct player *p) {
  p->size[0] = ranks;
  p->self[0] = p->rank;
  MUST(ncclCommInitRank(&p->comms[0], ranks, world_id, p->rank));
  for (int r = 0; r < ranks; r++) p->members[0][r] = r;
  split(p, 1, p->rank % 2, p->rank);                  // odd and even
  split(p, 2, p->rank < ranks / 2, ranks - p->rank);  // halves, ordered backwards
  for (int r = 0, odd = 0, half = 0; r < ranks; r++) {
    int back = ranks - 1 - r;
    if (r % 2 == p->rank % 2) p->members[1][odd++] = r;
    if ((back < ranks / 2) == (p->rank < ranks / 2)) p->members[2][half++] = back;
  }
  if (p->members[1][p->self[1]] != p->rank || p->members[2][p->self[2]] != p->rank)
    die("rank %d: a split gave ranks %d and %d", p->rank, p->self[1], p->self[2]);
  for (int s = 0; s < STREAMS; s++) MUST(cuStreamCreate(&p->streams[s], 0));
  p->memory = calloc((size_t)STREAMS * SLOTS * 2, (size_t)MAX_COUNT * MAX_RANKS * 8);
}

static void *play(void *argument) {
  struct player *p = argument;
  setup(p);
  uint64_t state = seed, own = seed + (uint64_t)p->rank + 1;
  for (int step = 0; step < rounds;) {
    // A group, or a single call. Both halves of a split draw alike, so all ranks stay together.
    int which = below(&state, COMMS), calls = below(&state, 4) ? 1 : below(&state, SLOTS) + 1;
    struct job *jobs[SLOTS];
    for (int i = 0; i < calls; i++) {
      jobs[i] = draw(p, &state, step++, i, which);
      cuLaunchHostFunc(jobs[i]->s, fill, jobs[i]);
    }
    if (below(&own, 20) == 0) usleep((unsigned)below(&own, 3000));
    if (calls > 1) MUST(ncclGroupStart());
    for (int i = 0; i < calls; i++) call(jobs[i]);
    if (calls > 1) MUST(ncclGroupEnd());
    for (int i = 0; i < calls; i++) cuLaunchHostFunc(jobs[i]->s, check, jobs[i]);
    if (below(&own, 50) == 0) MUST(cuStreamSynchronize(p->streams[below(&own, STREAMS)]));
  }
  for (int s = 0; s < STREAMS; s++) MUST(cuStreamSynchronize(p->streams[s]));
  for (int c = COMMS - 1; c >= 0; c--) MUST(ncclCommDestroy(p->comms[c]));
  for (int s = 0; s < STREAMS; s++) MUST(cuStreamDestroy_v2(p->streams[s]));
  free(p->memory);
  return 0;
}

// meet passes the id of the communicator from the first process to the others.
static void meet(const char *path) {
  char draft[4096];
  snprintf(draft, sizeof draft, "%s.draft", path);
  if (first_rank == 0) {
    MUST(ncclGetUniqueId(&world_id));
    FILE *f = fopen(draft, "w");
    if (!f || fwrite(&world_id, sizeof world_id, 1, f) != 1 || fclose(f)) die("writing %s", draft);
    MUST(rename(draft, path));
    return;
  }
  FILE *f;
  while (!(f = fopen(path, "r"))) usleep(1000);
  if (fread(&world_id, sizeof world_id, 1, f) != 1) die("reading %s", path);
  fclose(f);
}

int main(int count, char **arguments) {
  if (count != 7) die("ncclstress FILE RANKS FIRST HERE ROUNDS SEED");
  ranks = atoi(arguments[2]);
  first_rank = atoi(arguments[3]);
  int here = atoi(arguments[4]);
  rounds = atoi(arguments[5]);
  seed = strtoull(arguments[6], 0, 10);
  meet(arguments[1]);
  struct player players[MAX_RANKS] = {{0}};
  pthread_t threads[MAX_RANKS];
  for (int i = 0; i < here; i++) {
    players[i].rank = first_rank + i;
    MUST(pthread_create(&threads[i], 0, play, &players[i]));
  }
  for (int i = 0; i < here; i++) MUST(pthread_join(threads[i], 0));
  printf("%d ranks, %d rounds\n", here, rounds);
  return 0;
}
