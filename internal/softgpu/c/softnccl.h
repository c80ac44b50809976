// A software NCCL: prototypes and parts. Names, numbers and argument order of the interface are
// those that NCCL documents; the text is ours.
//
//   nccl.c         the interface: communicators, groups, what is queued on streams
//   nccl_board.c   the place where ranks meet: shared memory of one communicator
//   nccl_reduce.c  element types and reductions
#ifndef SOFTGPU_SOFTNCCL_H
#define SOFTGPU_SOFTNCCL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "softlib.h"

// ---- the interface's numbers

enum {
  NCCL_OK = 0,
  NCCL_CUDA_ERROR = 1,
  NCCL_SYSTEM_ERROR = 2,
  NCCL_INTERNAL_ERROR = 3,
  NCCL_INVALID_ARGUMENT = 4,
  NCCL_INVALID_USAGE = 5,
  NCCL_REMOTE_ERROR = 6,
  NCCL_IN_PROGRESS = 7,
};

enum { NCCL_VERSION = 23007 };  // 2.30.7

enum nccl_type {
  NCCL_I8, NCCL_U8, NCCL_I32, NCCL_U32, NCCL_I64, NCCL_U64,
  NCCL_F16, NCCL_F32, NCCL_F64, NCCL_BF16, NCCL_E4M3, NCCL_E5M2, NCCL_TYPES,
};

enum nccl_op { NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG, NCCL_OPS };

typedef struct { char text[128]; } nccl_id;

// The beginning of NCCL's configuration of a communicator; only blocking is read.
struct nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking;  // 0: calls return at once and say "in progress"
};

// ---- nccl_reduce.c

size_t nccl_width(int type);            // bytes of an element
const char *nccl_type_name(int type);   // "f32", or 0 for a number that is no type
const char *nccl_op_name(int op);

// nccl_reduce combines ranks' elements in the order of ranks and stores the result. It computes in
// f32 for f16, bf16 and f32, in f64 for f64, and with 64 bits for integers, and rounds once.
void nccl_reduce(void *result, void *const *parts, int ranks, size_t count, int type, int op);

// ---- nccl_board.c

enum { MAX_RANKS = 256, MAX_MEETINGS = 1024 };

enum call_kind {
  ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, REDUCE, POINT_TO_POINT, SPLIT,
};

// A call is what all ranks of a collective must say alike.
struct call {
  int32_t kind, type, op, root;
  uint64_t count;
};

// How calls are numbered. Calls of a numbering meet by number; each rank counts for itself, in the
// order in which the program makes the calls.
enum numbering { BY_CALL, BY_CAPTURE, BY_SPLIT };

// A key names a meeting: the same on all ranks that take part.
struct key {
  uint32_t numbering;
  int32_t from, to;  // of a point-to-point message; -1 for collectives
  uint32_t unused;
  uint64_t number;
  uint64_t replay;  // of a captured call: how often its graph ran before
};

// A meeting is one collective (or message) under way.
struct meeting {
  struct key key;  // these two fields must be alike
  struct call call;
  int32_t used;
  int32_t first;     // the rank that came first and wrote call
  int32_t expected;  // ranks that take part
  int32_t arrived;   // ... that have put down their data
  int32_t left;      // ... that are through; the last one frees the meeting
  int32_t done;      // the result is there
  uint64_t serial;   // names the file that holds the data
  uint8_t here[MAX_RANKS];
};

// A seat is one rank of a board.
struct seat {
  int32_t joined, left, process;
  uint64_t begun;  // calls begun, for the report of a hang
};

// A board is the shared memory of a communicator.
struct board_memory {
  int32_t ranks, joined;
  _Atomic uint32_t tick;  // futex: changes whenever something does
  pthread_mutex_t lock;   // shared between processes; survives the death of its owner
  uint64_t serial;
  int32_t top;            // meetings from here on have never been used
  struct seat seats[MAX_RANKS];
  struct meeting meetings[MAX_MEETINGS];
};

// A board of this process: one mapping, however many ranks of the communicator live here.
struct board {
  struct board_memory *memory;
  char path[256];
  int users;
  struct board *next;
};

// board_join takes a seat, without waiting for the others; board_leave gives it back.
struct board *board_join(const char *id, int ranks, int rank);
void board_leave(struct board *b, int rank);
void board_lock(struct board *b);
void board_unlock(struct board *b);
void board_wake(struct board *b);  // with the lock held

// board_wait gives the lock away until something changes, or until the deadline in seconds of
// board_now (0: none); it tells whether the deadline has passed.
int board_wait(struct board *b, double deadline);
double board_now(void);
double board_deadline(void);  // of a wait that begins now, by SOFTGPU_NCCL_TIMEOUT; 0: none

// board_meet finds the meeting of a key or calls it; with the lock held. A rank that says another
// call than the first one ends the process by name.
struct meeting *board_meet(struct board *b, const struct key *key, const struct call *call,
                           int rank, int expected);
// board_arrive says that a rank has put down its data, and tells whether it was the last one; with
// the lock held. By then all have opened the file, so the last one drops it.
int board_arrive(struct board *b, struct meeting *m, int rank);
// board_part leaves a meeting; the last one frees it; with the lock held.
void board_part(struct meeting *m);
// board_file opens the file that holds a meeting's data. A rank opens it before it arrives.
int board_file(struct board *b, uint64_t serial);
void file_write(int file, const void *data, size_t bytes, size_t at);
void file_read(int file, void *data, size_t bytes, size_t at);
// board_hang names the ranks that a meeting waits for and ends the process.
_Noreturn void board_hang(struct board *b, const struct meeting *m, int rank);
// nccl_fault says what the program did wrong and ends the process.
_Noreturn void nccl_fault(const char *format, ...) SG_FORMAT(1);
const char *call_text(const struct call *call, char *text, size_t size);

// ---- nccl.c, nccl_launch.c

// How far a communicator has come to be.
enum stage { SPLITTING, JOINING, READY };

struct nccl_comm {
  _Atomic(struct board *) board;  // of this communicator; 0 while SPLITTING
  char id[128];
  int rank, ranks, device, blocking;
  _Atomic int aborted;

  pthread_mutex_t settling;  // guards the rest of this paragraph
  _Atomic int stage;
  struct nccl_comm *parent;  // of a split that is under way, and this rank's part in it
  struct meeting *meeting;
  int file, color, key;

  pthread_mutex_t lock;  // guards the rest
  pthread_cond_t changed;
  int holders;             // the program, and launches that have not run
  int destroyed;
  uint64_t issued, turn;   // launches queued and launches through, both in the order of calls
  uint64_t numbers[2];     // collectives by numbering: BY_CALL, BY_CAPTURE
  uint64_t splits;
  uint64_t *sent[2], *received[2];  // messages to and from each rank, by numbering
};
typedef struct nccl_comm *nccl_comm;

// comm_settle brings a communicator into being. If it has to wait for other ranks and must not, it
// returns NCCL_IN_PROGRESS; NCCL_REMOTE_ERROR means that it was aborted.
int comm_settle(nccl_comm comm, int wait);
void comm_hold(nccl_comm comm);
void comm_release(nccl_comm comm);

// launch_add takes a call and queues it, or keeps it until the end of the group.
struct work {
  nccl_comm comm;
  soft_stream stream;
  struct call call;
  const void *in;
  void *out;
  int sends;  // of a message: this rank sends it
  struct key key;

  struct meeting *meeting;  // while the work runs
  int file;
  struct work *next;
};
int launch_add(struct work work);
// group_add_comm keeps a communicator until the end of the group, which then waits for it.
int group_depth(void);
int group_add_comm(nccl_comm comm);

#endif
