// Single situations of the software NCCL: ncclcases NAME. Two ranks, in threads or in processes.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct CUstream_st *stream;
typedef struct nccl_comm *comm;
typedef struct { char text[128]; } id;
struct config {
  size_t size;
  unsigned magic, version;
  int blocking;
  int rest[32];
};

int cuStreamCreate(stream *, unsigned);
int cuStreamSynchronize(stream);
int cuLaunchHostFunc(stream, void (*)(void *), void *);
int ncclGetUniqueId(id *);
int ncclCommInitRank(comm *, int, id, int);
int ncclCommInitRankConfig(comm *, int, id, int, struct config *);
int ncclCommInitAll(comm *, int, const int *);
int ncclCommSplit(comm, int, int, comm *, void *);
int ncclCommCuDevice(comm, int *);
int ncclCommDestroy(comm);
int ncclCommAbort(comm);
int ncclCommGetAsyncError(comm, int *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, comm, stream);
int ncclAllGather(const void *, void *, size_t, int, comm, stream);
int ncclBroadcast(const void *, void *, size_t, int, int, comm, stream);
int ncclReduce(const void *, void *, size_t, int, int, int, comm, stream);
int ncclSend(const void *, size_t, int, int, comm, stream);
int ncclRecv(void *, size_t, int, int, comm, stream);

enum { I32 = 2, F32 = 7, BF16 = 9, E4M3 = 10, SUM = 0, MAX = 2 };

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  _exit(1);
}

#define MUST(call)                                  \
  do {                                              \
    int result_ = (call);                           \
    if (result_) die("%s gave %d", #call, result_); \
  } while (0)

static id world;
static const char *name;

static int is(const char *other) { return !strcmp(name, other); }

static void late(void *microseconds) { usleep((unsigned)(size_t)microseconds); }

struct rank {
  int at;
  comm c;
  stream s, other;
  float in[4], out[8];
};

// Calls that do not match: rank 1 says something else than rank 0.
static void mismatch(struct rank *r) {
  int odd = r->at;
  if (is("kind") && odd)
    MUST(ncclAllGather(r->in, r->out, 4, F32, r->c, r->s));
  else if (is("root"))
    MUST(ncclBroadcast(r->in, r->out, 4, F32, odd, r->c, r->s));
  else if (is("message"))
    MUST(odd ? ncclSend(r->in, 3, F32, 0, r->c, r->s) : ncclRecv(r->out, 4, F32, 1, r->c, r->s));
  else
    MUST(ncclAllReduce(r->in, r->out, is("count") ? 3 + odd : 4, is("type") && odd ? I32 : F32,
                       is("op") && odd ? MAX : SUM, r->c, r->s));
  MUST(cuStreamSynchronize(r->s));
}

// The program's calls alternate between two streams, and on each rank another stream is late: the
// calls must meet in the order in which they were made.
static void order(struct rank *r) {
  float in[20][1], out[20][1];
  for (int i = 0; i < 20; i++) {
    in[i][0] = (float)(100 * i + r->at);
    stream s = i % 2 ? r->other : r->s;
    if (i % 2 == r->at) cuLaunchHostFunc(s, late, (void *)(size_t)2000);
    MUST(ncclAllReduce(in[i], out[i], 1, F32, SUM, r->c, s));
  }
  MUST(cuStreamSynchronize(r->s));
  MUST(cuStreamSynchronize(r->other));
  for (int i = 0; i < 20; i++)
    if (out[i][0] != (float)(200 * i + 1)) die("call %d gave %g", i, out[i][0]);
}

// A group with two streams of one communicator: both wait for both calls.
static void streams(struct rank *r) {
  float in[2] = {1, 2}, out[2] = {0};
  MUST(ncclGroupStart());
  MUST(ncclAllReduce(&in[0], &out[0], 1, F32, SUM, r->c, r->s));
  MUST(ncclAllReduce(&in[1], &out[1], 1, F32, SUM, r->c, r->other));
  if (out[0] != 0) die("a call of an open group has run");
  MUST(ncclGroupEnd());
  MUST(cuStreamSynchronize(r->s));
  if (out[0] != 2 || out[1] != 4) die("one stream is through with %g %g", out[0], out[1]);
  MUST(cuStreamSynchronize(r->other));
}

// One rank waits for the other, which never comes, until its communicator is aborted.
static void aborted(struct rank *r) {
  if (r->at == 1) return;
  r->out[0] = 77;
  MUST(ncclAllReduce(r->in, r->out, 4, F32, SUM, r->c, r->s));
  MUST(ncclAllReduce(r->in, r->out, 4, F32, SUM, r->c, r->other));  // waits for its turn
  usleep(50000);
  int error = -1;
  MUST(ncclCommGetAsyncError(r->c, &error));
  if (error) die("the asynchronous error is %d", error);
  MUST(ncclCommAbort(r->c));
  MUST(cuStreamSynchronize(r->s));
  MUST(cuStreamSynchronize(r->other));
  if (r->out[0] != 77) die("an aborted call wrote %g", r->out[0]);
}

// Sums of bf16, and a reduction to one rank.
static void rounding(struct rank *r) {
  unsigned short in[2] = {r->at ? 0x3f80 : 0x4380, 0x3f80}, out[4] = {0};
  MUST(ncclAllGather(in, out, 2, BF16, r->c, r->s));
  unsigned short sum[2] = {0};
  MUST(ncclReduce(in, sum, 2, BF16, SUM, 1, r->c, r->s));
  MUST(cuStreamSynchronize(r->s));
  if (out[0] != 0x4380 || out[1] != 0x3f80 || out[2] != 0x3f80) die("gathered %x", out[0]);
  unsigned short want[2] = {0x4380, 0x4000};  // 257 is a tie: to even
  if (r->at == 1 && memcmp(sum, want, sizeof want)) die("reduced %x %x", sum[0], sum[1]);
}

static void splits(struct rank *r) {
  comm c = (comm)1;
  MUST(ncclCommSplit(r->c, r->at ? -1 : 5, 0, &c, 0));
  if (r->at && c) die("a rank without a color has a communicator");
  if (r->at) return;
  MUST(ncclAllReduce(r->in, r->out, 4, F32, SUM, c, r->s));
  MUST(cuStreamSynchronize(r->s));
  if (r->out[3] != r->in[3]) die("alone: %g", r->out[3]);
  MUST(ncclCommDestroy(c));
}

static void unmatched(struct rank *r) {  // both send first: a program that NCCL would block
  MUST(ncclSend(r->in, 4, F32, !r->at, r->c, r->s));
  MUST(ncclRecv(r->out, 4, F32, !r->at, r->c, r->s));
  MUST(cuStreamSynchronize(r->s));
}

static void hang(struct rank *r) {
  if (r->at == 1) pause();
  MUST(ncclAllReduce(r->in, r->out, 4, F32, SUM, r->c, r->s));
  MUST(cuStreamSynchronize(r->s));
}

static void dead(struct rank *r) {
  if (r->at == 1) _exit(0);
  usleep(100000);
  hang(r);
}

static void refused(struct rank *r) {
  if (is("fp8"))
    MUST(ncclAllReduce(r->in, r->out, 4, E4M3, SUM, r->c, r->s));
  else if (is("unknown type"))
    MUST(ncclAllReduce(r->in, r->out, 4, 40, SUM, r->c, r->s));
  else
    MUST(ncclAllReduce(r->in, r->out, 4, F32, 9, r->c, r->s));
  MUST(cuStreamSynchronize(r->s));
}

static const struct {
  const char *name;
  void (*run)(struct rank *);
} cases[] = {
    {"kind", mismatch},     {"count", mismatch},       {"type", mismatch},  {"op", mismatch},
    {"root", mismatch},     {"message", mismatch},     {"order", order},    {"streams", streams},
    {"abort", aborted},     {"rounding", rounding},    {"splits", splits},  {"sends", unmatched},
    {"hang", hang},         {"dead", dead},            {"fp8", refused},    {"unknown op", refused},
    {"unknown type", refused},
};

static void *play(void *argument) {
  struct rank *r = argument;
  MUST(cuStreamCreate(&r->s, 0));
  MUST(cuStreamCreate(&r->other, 0));
  for (int i = 0; i < 4; i++) r->in[i] = (float)(r->at + i);
  MUST(ncclCommInitRank(&r->c, 2, world, r->at));
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (is(cases[i].name)) {
      cases[i].run(r);
      return 0;
    }
  die("no case %s", name);
  return 0;
}

// Communicators of one thread: all ranks in a group, without blocking, and by ncclCommInitAll.
static void one_thread(void) {
  comm c[2], all[2];
  struct config config = {.size = sizeof config, .blocking = 0};
  MUST(ncclGroupStart());
  for (int r = 0; r < 2; r++) MUST(ncclCommInitRank(&c[r], 2, world, r));
  MUST(ncclGroupEnd());
  MUST(ncclGetUniqueId(&world));
  for (int r = 0; r < 2; r++) {
    int result = ncclCommInitRankConfig(&c[r], 2, world, r, &config), error = -1;
    if (result != 7) die("without blocking: %d", result);
    MUST(ncclCommGetAsyncError(c[r], &error));
    if (error != (r ? 0 : 7)) die("rank %d: asynchronous error %d", r, error);
  }
  int device = -1;
  MUST(ncclCommInitAll(all, 2, (int[]){3, 5}));
  MUST(ncclCommCuDevice(all[1], &device));
  if (device != 5) die("GPU %d", device);
  stream s[2];
  float in[2] = {1, 2}, out[2] = {0};
  for (int r = 0; r < 2; r++) MUST(cuStreamCreate(&s[r], 0));
  MUST(ncclGroupStart());
  for (int r = 0; r < 2; r++) MUST(ncclAllReduce(&in[r], &out[r], 1, F32, SUM, all[r], s[r]));
  MUST(ncclGroupEnd());
  for (int r = 0; r < 2; r++) MUST(cuStreamSynchronize(s[r]));
  if (out[0] != 3 || out[1] != 3) die("sums %g %g", out[0], out[1]);
}

int main(int count, char **arguments) {
  if (count != 2) die("ncclcases NAME");
  name = arguments[1];
  MUST(ncclGetUniqueId(&world));
  if (is("one thread")) {
    one_thread();
    return 0;
  }
  struct rank ranks[2] = {{.at = 0}, {.at = 1}};
  if (is("dead")) {  // rank 1 is another process
    pid_t child = fork();
    if (child == 0) play(&ranks[1]);
    pthread_t first;
    MUST(pthread_create(&first, 0, play, &ranks[0]));
    waitpid(child, 0, 0);
    MUST(pthread_join(first, 0));
    return 0;
  }
  pthread_t threads[2];
  for (int r = 0; r < 2; r++) MUST(pthread_create(&threads[r], 0, play, &ranks[r]));
  for (int r = 0; r < 2; r++) MUST(pthread_join(threads[r], 0));
  return 0;
}
