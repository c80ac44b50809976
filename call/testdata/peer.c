// A process that owns memory of a GPU and has another one compute with it, as PyTorch would: it
// starts the program of its arguments with a socket as standard input, and does what its own
// standard input says, a line for each:
//
//   alloc BYTES            cuMemAlloc: an address, the handle in hexadecimal
//   free ADDRESS           cuMemFree
//   write ADDRESS BYTES    and that many bytes, which are there when it answers
//   read ADDRESS BYTES     those bytes
//   ask BYTES              and that many bytes: a request to the other process; its answer
//
// PEER_CHILD_SEES is the other process's CUDA_VISIBLE_DEVICES. Every answer is a line "ok" with what is asked for, or "error" with the driver's result; bytes
// follow their number.
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "softcuda.h"

static CUstream stream;
static int other;

static void fail(const char *what) {
  fprintf(stderr, "peer: %s\n", what);
  exit(1);
}

static void must(CUresult result) {
  if (result) {
    fprintf(stderr, "peer: the driver says %d\n", result);
    exit(1);
  }
}

static void start(char **program) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) fail("no socket");
  other = ends[0];
  pid_t child = fork();
  if (child < 0) fail("no process");
  if (child == 0) {
    dup2(ends[1], 0);
    dup2(2, 1);
    unsetenv("SOFTGPU_SHARE");  // its own memory is for itself
    const char *visible = getenv("PEER_CHILD_SEES");
    if (visible) setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    execv(program[0], program);
    _exit(127);
  }
  close(ends[1]);
  fprintf(stderr, "peer: child %d\n", child);
}

static void *body(size_t bytes) {
  char *data = malloc(bytes ? bytes : 1);
  if (!data || fread(data, 1, bytes, stdin) != bytes) fail("a body ends early");
  return data;
}

static void answer(const void *data, size_t bytes) {
  printf("ok %zu\n", bytes);
  fwrite(data, 1, bytes, stdout);
}

// whole reads or writes all of a message of the socket.
static void whole(char *data, size_t bytes, int reads) {
  while (bytes) {
    ssize_t n = reads ? read(other, data, bytes) : write(other, data, bytes);
    if (n <= 0) fail("the other process has ended");
    data += n;
    bytes -= (size_t)n;
  }
}

// ask waits for its own work on the GPU first: the other process has no stream of this one.
static void ask(size_t bytes) {
  char *request = body(bytes);
  uint32_t size = (uint32_t)bytes;
  must(cuStreamSynchronize(stream));
  whole((char *)&size, sizeof size, 0);
  whole(request, bytes, 0);
  whole((char *)&size, sizeof size, 1);
  char *said = malloc(size ? size : 1);
  whole(said, size, 1);
  answer(said, size);
  free(said);
  free(request);
}

static void alloc(size_t bytes) {
  CUdeviceptr p;
  CUipcMemHandle handle;
  CUresult result = cuMemAlloc_v2(&p, bytes);
  if (!result) result = cuIpcGetMemHandle(&handle, p);
  if (result) {
    printf("error %d\n", result);
    return;
  }
  printf("ok %llu ", p);
  for (size_t i = 0; i < sizeof handle; i++) printf("%02x", (unsigned char)handle.reserved[i]);
  printf("\n");
}

static void do_line(const char *line) {
  unsigned long long p;
  size_t bytes;
  if (sscanf(line, "alloc %zu", &bytes) == 1) {
    alloc(bytes);
  } else if (sscanf(line, "free %llu", &p) == 1) {
    must(cuMemFree_v2(p));
    printf("ok\n");
  } else if (sscanf(line, "write %llu %zu", &p, &bytes) == 2) {
    void *data = body(bytes);
    must(cuMemcpyHtoDAsync_v2(p, data, bytes, stream));
    must(cuStreamSynchronize(stream));
    free(data);
    printf("ok\n");
  } else if (sscanf(line, "read %llu %zu", &p, &bytes) == 2) {
    void *data = malloc(bytes ? bytes : 1);
    must(cuMemcpyDtoHAsync_v2(data, p, bytes, stream));
    must(cuStreamSynchronize(stream));
    answer(data, bytes);
    free(data);
  } else if (sscanf(line, "ask %zu", &bytes) == 1) {
    ask(bytes);
  } else {
    fail(line);
  }
  fflush(stdout);
}

int main(int argc, char **argv) {
  if (argc < 2) fail("which program?");
  start(argv + 1);
  CUcontext context;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&context, 0));
  must(cuCtxSetCurrent(context));
  must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  char line[256];
  while (fgets(line, sizeof line, stdin)) do_line(line);
  return 0;
}
