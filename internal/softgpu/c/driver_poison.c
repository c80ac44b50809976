// What memory of a GPU holds before anybody has written it: all bits are ones, which is NaN in
// every float format, so that a buffer that should have been zeroed shows in the numbers.
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

enum {
  POISON = 0xff,
  TILE = 4 << 20,     // bytes of the file of poison
  FIRST = 16 << 20,   // bytes of created memory that are poisoned
};

static pthread_once_t tile_once = PTHREAD_ONCE_INIT;
static int tile = -1;

static void write_poison(int file, size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) sg_fail("a host without memory");
  memset(at, POISON, bytes);
  munmap(at, bytes);
}

static void make_tile(void) {
  tile = memfd_create("softgpu poison", MFD_CLOEXEC);
  if (tile < 0 || ftruncate(tile, TILE)) sg_fail("a host without memory files");
  write_poison(tile, TILE);
}

// The file of poison is mapped again and again, and its pages are copied when they are first
// written: memory that is not used costs the host nothing.
void *sg_poisoned(size_t bytes) {
  pthread_once(&tile_once, make_tile);
  char *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  for (size_t done = 0; done < bytes; done += TILE) {
    size_t part = bytes - done < TILE ? bytes - done : TILE;
    if (mmap(at + done, part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, tile,
             0) != MAP_FAILED)
      continue;
    munmap(at, bytes);
    return NULL;
  }
  return at;
}

// Created memory may be mapped at several addresses, so it is a file of its own, and poison costs
// memory of the host: only the first part has it. XLA's allocator hands out low addresses first.
void sg_poison_file(int file, size_t bytes) { write_poison(file, bytes < FIRST ? bytes : FIRST); }
