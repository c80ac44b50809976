// The least of a driver that the software NCCL and cuBLAS need: streams, each with a thread that runs
// host functions in order. Tests of the libraries use it in the place of the software driver.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>

struct item {
  void (*run)(void *);
  void *argument;
  struct item *next;
};

struct CUstream_st {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct item *first, **end;
  int busy, stopped;
};
typedef struct CUstream_st *stream;

static void *work(void *argument) {
  stream s = argument;
  pthread_mutex_lock(&s->lock);
  for (;;) {
    while (!s->first && !s->stopped) pthread_cond_wait(&s->changed, &s->lock);
    if (!s->first) break;
    struct item *next = s->first;
    s->first = next->next;
    if (!s->first) s->end = &s->first;
    s->busy = 1;
    pthread_mutex_unlock(&s->lock);
    next->run(next->argument);
    free(next);
    pthread_mutex_lock(&s->lock);
    s->busy = 0;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->lock);
  return 0;
}

int cuStreamCreate(stream *out, unsigned flags) {
  (void)flags;
  stream s = calloc(1, sizeof *s);
  s->end = &s->first;
  pthread_mutex_init(&s->lock, 0);
  pthread_cond_init(&s->changed, 0);
  *out = s;
  return pthread_create(&s->thread, 0, work, s);
}

int cuLaunchHostFunc(stream s, void (*run)(void *), void *argument) {
  struct item *i = malloc(sizeof *i);
  *i = (struct item){run, argument, 0};
  pthread_mutex_lock(&s->lock);
  *s->end = i;
  s->end = &i->next;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  return 0;
}

int cuStreamSynchronize(stream s) {
  pthread_mutex_lock(&s->lock);
  while (s->first || s->busy) pthread_cond_wait(&s->changed, &s->lock);
  pthread_mutex_unlock(&s->lock);
  return 0;
}

int cuStreamDestroy_v2(stream s) {
  pthread_mutex_lock(&s->lock);
  s->stopped = 1;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->lock);
  pthread_join(s->thread, 0);
  free(s);
  return 0;
}

int cuStreamIsCapturing(stream s, int *status) {
  (void)s;
  *status = 0;
  return 0;
}

int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
  *address = (unsigned long long)(size_t)malloc(bytes);
  return *address ? 0 : 2;
}

int cuMemFree_v2(unsigned long long address) {
  free((void *)(size_t)address);
  return 0;
}
