// Settings, the table of GPUs, and the two ways a library of the software GPU speaks.
#define _GNU_SOURCE
#include "common.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Noreturn void sg_fail(const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  fprintf(stderr, "softgpu: not played: %s\n", text);
  fflush(stderr);
  _exit(SG_UNPLAYED);  // no destructors: other threads still run
}

_Noreturn void sg_unplayed(const char *library, const char *function) {
  sg_fail("function %s of %s", function, library);
}

static pthread_once_t log_once = PTHREAD_ONCE_INIT;
static FILE *log_file;

static void open_log(void) {
  const char *path = getenv("SOFTGPU_LOG");
  if (path && *path) log_file = fopen(path, "a");
}

void sg_log(const char *format, ...) {
  pthread_once(&log_once, open_log);
  if (!log_file) return;
  va_list list;
  va_start(list, format);
  flockfile(log_file);
  vfprintf(log_file, format, list);
  fputc('\n', log_file);
  fflush(log_file);
  funlockfile(log_file);
  va_end(list);
}

long long sg_setting(const char *name, long long fallback) {
  const char *text = getenv(name);
  return text && *text ? strtoll(text, NULL, 0) : fallback;
}

// The same facts as machine/gpus.json, as far as a driver is asked for them.
static const struct sg_model models[] = {
    {.key = "b200", .name = "NVIDIA B200", .major = 10, .minor = 0, .processors = 148,
     .memory = 191514411008, .threads = 2048, .blocks = 32, .shared = 233472, .optin = 232448,
     .l2 = 132644864, .clock = 1965000, .memory_clock = 3996000, .bus = 7680, .links = 18},
    {.key = "gb300", .name = "NVIDIA GB300", .major = 10, .minor = 3, .processors = 152,
     .memory = 297021079552, .threads = 2048, .blocks = 32, .shared = 233472, .optin = 232448,
     .l2 = 135528448, .clock = 2070000, .memory_clock = 3996000, .bus = 7936, .links = 18},
    {.key = "rtx6000pro", .name = "NVIDIA RTX PRO 6000 Blackwell Server Edition", .major = 12,
     .minor = 0, .processors = 188, .memory = 101972967424, .threads = 1536, .blocks = 24,
     .shared = 131072, .optin = 101376, .l2 = 134217728, .clock = 2600000,
     .memory_clock = 14001000, .bus = 512},
};

const struct sg_model *sg_model(void) {
  const char *key = getenv("SOFTGPU_MODEL");
  if (!key || !*key) return &models[0];
  for (size_t i = 0; i < sizeof models / sizeof *models; i++)
    if (!strcmp(models[i].key, key)) return &models[i];
  sg_fail("GPU %s", key);
}

int sg_gpus(void) {
  long long n = sg_setting("SOFTGPU_GPUS", 1);
  if (n < 0 || n > SG_MAX_GPUS) sg_fail("%lld GPUs in one process", n);
  return (int)n;
}

size_t sg_memory(void) {
  return (size_t)sg_setting("SOFTGPU_MEMORY", (long long)sg_model()->memory);
}
