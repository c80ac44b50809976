// The place where the ranks of a communicator meet.
//
// A board is a file that every process of the communicator maps. It says who has joined and which
// meetings (collectives, messages) are under way; data lie in a file for each meeting. Everything
// in the mapping is guarded by one lock. Waiting is by a futex and not by a condition variable:
// those of glibc can block the others when a process dies while it waits.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "softnccl.h"

static pthread_mutex_t boards_lock = PTHREAD_MUTEX_INITIALIZER;
static struct board *boards;  // of this process

// nccl_fault says what the program did wrong and ends the process. The status is the one of things
// that are not there: a test must not go on.
_Noreturn void nccl_fault(const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(stderr, "softgpu: NCCL fault: %s\n", text);
  fflush(stderr);
  _exit(SG_UNPLAYED);
}

// ---- creating and joining

static const char *folder(void) {
  const char *named = getenv("SOFTGPU_NCCL_DIR");
  if (named && *named) return named;
  return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
}

static void prepare(struct board_memory *memory, int ranks) {
  memory->ranks = ranks;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&memory->lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

static struct board_memory *map(int file) {
  struct board_memory *memory =
      mmap(0, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) nccl_fault("mapping a communicator: %s", strerror(errno));
  return memory;
}

// create makes the file of a board complete under another name and then links it, so that nobody
// sees half of one; it returns 0 if another process was faster.
static struct board_memory *create(const char *path, int ranks) {
  char draft[300];
  snprintf(draft, sizeof draft, "%s.%d", path, getpid());
  int file = open(draft, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct board_memory)))
    nccl_fault("creating %s: %s", draft, strerror(errno));
  struct board_memory *memory = map(file);
  close(file);
  prepare(memory, ranks);
  int linked = link(draft, path) == 0;
  if (!linked && errno != EEXIST) nccl_fault("linking %s: %s", path, strerror(errno));
  unlink(draft);
  if (linked) return memory;
  munmap(memory, sizeof *memory);
  return 0;
}

// attach finds this process' mapping of a board, or makes one; boards_lock is held.
static struct board *attach(const char *id, int ranks) {
  char path[sizeof ((struct board *)0)->path];
  if (snprintf(path, sizeof path, "%s/%s", folder(), id) >= (int)sizeof path - 32)
    nccl_fault("the path of communicator %s is too long", id);
  for (struct board *b = boards; b; b = b->next)
    if (!strcmp(b->path, path)) return b;
  struct board_memory *memory = 0;
  for (int file; !memory;) {
    if ((file = open(path, O_RDWR | O_CLOEXEC)) >= 0) {
      memory = map(file);
      close(file);
    } else if (errno == ENOENT) {
      memory = create(path, ranks);
    } else {
      nccl_fault("opening %s: %s", path, strerror(errno));
    }
  }
  struct board *b = calloc(1, sizeof *b);
  memcpy(b->path, path, sizeof path);
  b->memory = memory;
  b->next = boards;
  boards = b;
  return b;
}

struct board *board_join(const char *id, int ranks, int rank) {
  if (ranks > MAX_RANKS) sg_fail("NCCL communicator of %d ranks", ranks);
  pthread_mutex_lock(&boards_lock);
  struct board *b = attach(id, ranks);
  b->users++;
  pthread_mutex_unlock(&boards_lock);
  board_lock(b);
  struct board_memory *memory = b->memory;
  if (memory->ranks != ranks)
    nccl_fault("communicator %s: rank %d says %d ranks, others %d", id, rank, ranks,
               memory->ranks);
  if (memory->seats[rank].joined) nccl_fault("communicator %s: rank %d joins twice", id, rank);
  memory->seats[rank].joined = 1;
  memory->seats[rank].process = getpid();
  // When all have it mapped nobody looks for the file any more. Dropped now, it cannot stay behind.
  if (++memory->joined == ranks) unlink(b->path);
  board_wake(b);
  board_unlock(b);
  return b;
}

void board_leave(struct board *b, int rank) {
  pthread_mutex_lock(&boards_lock);
  board_lock(b);
  struct board_memory *memory = b->memory;
  memory->seats[rank].left = 1;
  board_wake(b);
  board_unlock(b);
  if (--b->users == 0) {
    struct board **at = &boards;
    while (*at != b) at = &(*at)->next;
    *at = b->next;
    munmap(memory, sizeof *memory);
    free(b);
  }
  pthread_mutex_unlock(&boards_lock);
}

// ---- locking and waiting

void board_lock(struct board *b) {
  // The owner died: what it was changing is a few counters of its own meeting, which will never be
  // complete anyway. The others wait for it, as they would with NCCL.
  if (pthread_mutex_lock(&b->memory->lock) == EOWNERDEAD)
    pthread_mutex_consistent(&b->memory->lock);
}

void board_unlock(struct board *b) { pthread_mutex_unlock(&b->memory->lock); }

void board_wake(struct board *b) {
  atomic_fetch_add(&b->memory->tick, 1);
  syscall(SYS_futex, &b->memory->tick, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

double board_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double timeout(void) { return (double)sg_setting("SOFTGPU_NCCL_TIMEOUT", 0); }

double board_deadline(void) { return timeout() > 0 ? board_now() + timeout() : 0; }

int board_wait(struct board *b, double deadline) {
  // Whoever changes something takes the lock first, so the tick read here is older than any change
  // that this rank has not seen, and the futex returns at once if there was one.
  uint32_t seen = atomic_load(&b->memory->tick);
  struct timespec rest = {0}, *limit = 0;
  if (deadline > 0) {
    double seconds = deadline - board_now();
    if (seconds <= 0) return 1;
    rest.tv_sec = (time_t)seconds;
    rest.tv_nsec = (long)(1e9 * (seconds - (double)rest.tv_sec));
    limit = &rest;
  }
  board_unlock(b);
  syscall(SYS_futex, &b->memory->tick, FUTEX_WAIT, seen, limit, 0, 0);
  board_lock(b);
  return 0;
}

// ---- meetings

const char *call_text(const struct call *call, char *text, size_t size) {
  static const char *const kinds[] = {
      [ALL_REDUCE] = "all-reduce", [ALL_GATHER] = "all-gather",
      [REDUCE_SCATTER] = "reduce-scatter", [ALL_TO_ALL] = "all-to-all",
      [BROADCAST] = "broadcast", [REDUCE] = "reduce", [POINT_TO_POINT] = "message",
      [SPLIT] = "split",
  };
  int at = snprintf(text, size, "%s of %lu %s", kinds[call->kind], call->count,
                    nccl_type_name(call->type));
  if (call->op >= 0) at += snprintf(text + at, size - (size_t)at, " %s", nccl_op_name(call->op));
  if (call->root >= 0) snprintf(text + at, size - (size_t)at, " root %d", call->root);
  return text;
}

static const char *key_text(const struct key *key, char *text, size_t size) {
  static const char *const numberings[] = {"call", "captured call", "split"};
  int at = snprintf(text, size, "%s %lu", numberings[key->numbering], key->number);
  if (key->numbering == BY_CAPTURE)
    at += snprintf(text + at, size - (size_t)at, " in run %lu", key->replay);
  if (key->from >= 0)
    snprintf(text + at, size - (size_t)at, " from rank %d to %d", key->from, key->to);
  return text;
}

struct meeting *board_meet(struct board *b, const struct key *key, const struct call *call,
                           int rank, int expected) {
  struct board_memory *memory = b->memory;
  struct meeting *m = 0;
  for (int i = 0; i < memory->top; i++) {
    struct meeting *candidate = &memory->meetings[i];
    if (!candidate->used) {
      if (!m) m = candidate;
      continue;
    }
    if (memcmp(&candidate->key, key, sizeof *key)) continue;
    if (memcmp(&candidate->call, call, sizeof *call)) {
      char where[128], first[128], other[128];
      nccl_fault("communicator %s, %s: rank %d calls %s, rank %d %s", b->path,
                 key_text(key, where, sizeof where), candidate->first,
                 call_text(&candidate->call, first, sizeof first), rank,
                 call_text(call, other, sizeof other));
    }
    return candidate;
  }
  if (!m) {
    if (memory->top == MAX_MEETINGS) sg_fail("%d NCCL calls under way at once", MAX_MEETINGS);
    m = &memory->meetings[memory->top++];
  }
  *m = (struct meeting){.key = *key, .call = *call, .used = 1, .first = rank,
                        .expected = expected, .serial = memory->serial++};
  return m;
}

int board_arrive(struct board *b, struct meeting *m, int rank) {
  m->here[rank] = 1;
  if (++m->arrived < m->expected) return 0;
  char path[300];
  snprintf(path, sizeof path, "%s+%lu", b->path, m->serial);
  unlink(path);
  return 1;
}

void board_part(struct meeting *m) {
  if (++m->left == m->expected) m->used = 0;
}

void board_hang(struct board *b, const struct meeting *m, int rank) {
  struct board_memory *memory = b->memory;
  char where[128], what[128], missing[512] = "";
  size_t at = 0;
  for (int r = 0; r < memory->ranks && at + 80 < sizeof missing; r++) {
    if (m ? m->here[r] : memory->seats[r].joined) continue;
    if (m && m->key.from >= 0 && r != m->key.from && r != m->key.to) continue;
    const struct seat *s = &memory->seats[r];
    const char *state = !s->joined                                  ? "not joined"
                        : s->left                                   ? "left"
                        : kill(s->process, 0) && errno == ESRCH     ? "its process is gone"
                                                                    : "alive";
    at += (size_t)snprintf(missing + at, sizeof missing - at, "%s%d (%s, %lu calls begun)",
                           at ? ", " : "", r, state, s->begun);
  }
  nccl_fault("communicator %s, %s %s: rank %d has waited %g s for rank %s", b->path,
             m ? key_text(&m->key, where, sizeof where) : "joining",
             m ? call_text(&m->call, what, sizeof what) : "", rank, timeout(), missing);
}

// ---- files

int board_file(struct board *b, uint64_t serial) {
  char path[300];
  snprintf(path, sizeof path, "%s+%lu", b->path, serial);
  int file = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) nccl_fault("opening %s: %s", path, strerror(errno));
  return file;
}

void file_write(int file, const void *data, size_t bytes, size_t at) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = pwrite(file, (const char *)data + done, bytes - done, (off_t)(at + done));
    if (n <= 0) nccl_fault("writing %zu bytes: %s", bytes, n ? strerror(errno) : "no room");
    done += (size_t)n;
  }
}

void file_read(int file, void *data, size_t bytes, size_t at) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = pread(file, (char *)data + done, bytes - done, (off_t)(at + done));
    if (n <= 0) nccl_fault("reading %zu bytes: %s", bytes, n ? strerror(errno) : "too few");
    done += (size_t)n;
  }
}
