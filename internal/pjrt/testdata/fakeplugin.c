// A plugin that plays what no machine here has: a GPU client of several processes, and plugins of
// other versions. It is compiled by the tests and speaks just enough of the PJRT C interface.
//
//   cc -shared -fPIC -DMINOR=116 -DSLOTS=140 fakeplugin.c -o fake.so
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MAJOR
#define MAJOR 0
#endif
#ifndef MINOR
#define MINOR 116
#endif
#ifndef SLOTS
#define SLOTS 140
#endif

typedef struct { int code; char text[256]; } error;

static error* fail(int code, const char* text) {
  error* e = calloc(1, sizeof *e);
  e->code = code;
  snprintf(e->text, sizeof e->text, "%s", text);
  return e;
}

// Every argument structure is a row of eight-byte words; words 0 and 1 are size and extension.
typedef uint64_t word;

static error* error_destroy(word* a) { free((void*)a[2]); return NULL; }
static error* error_message(word* a) {
  error* e = (error*)a[2];
  a[3] = (word)e->text;
  a[4] = strlen(e->text);
  return NULL;
}
static error* error_code(word* a) { *(int*)&a[3] = ((error*)a[2])->code; return NULL; }
static error* ok(word* a) { (void)a; return NULL; }
static error* missing(word* a) { (void)a; return fail(12, "the fake plugin does not do this"); }

typedef error* (*make_error)(int code, const char* text, size_t n);
static error* callback_error(int code, const char* text, size_t n) {
  char copy[200];
  snprintf(copy, sizeof copy, "%.*s", (int)n, text);
  return fail(code, copy);
}
static make_error maker = callback_error;

typedef struct {
  size_t size; void* ext; const char* key; size_t key_len; int timeout_ms; make_error* err;
  void* user; char* value; size_t value_len; void (*release)(char*);
} get_args;
typedef struct {
  size_t size; void* ext; const char* key; size_t key_len; make_error* err;
  void* user; char* value; size_t value_len; void (*release)(char*);
} try_args;
typedef struct {
  size_t size; void* ext; const char* key; size_t key_len; const char* value; size_t value_len;
  make_error* err; void* user;
} put_args;
typedef struct {
  size_t size; void* ext; const char* name; size_t name_len; int kind;
  union { const char* s; int64_t i; } v; size_t len;
} option;
typedef struct {
  size_t size; void* ext; option* options; size_t num_options;
  error* (*get)(get_args*); void* get_user; error* (*put)(put_args*); void* put_user;
  void* client; error* (*try_get)(try_args*); void* try_user;
} create_args;

typedef struct { int node; char greeting[64]; } client;

static int64_t find(create_args* a, const char* name) {
  for (size_t i = 0; i < a->num_options; i++)
    if (a->options[i].name_len == strlen(name) && !memcmp(a->options[i].name, name, strlen(name)))
      return a->options[i].v.i;
  return -1;
}

// client_create does what a client of several processes does: it puts its own address, sees that
// a key nobody has put is missing, and waits for the address of its neighbour.
static error* client_create(word* w) {
  create_args* a = (create_args*)w;
  int node = (int)find(a, "node_id"), nodes = (int)find(a, "num_nodes");
  if (find(a, "timeout_ms") >= 0) nodes = 2;
  if (nodes > 1 && (!a->get || !a->put || !a->try_get)) return fail(9, "no key-value store");
  client* c = calloc(1, sizeof *c);
  c->node = node;
  if (nodes > 1) {
    char key[64], value[64];
    snprintf(key, sizeof key, "address/%d", node);
    snprintf(value, sizeof value, "node %d", node);
    put_args p = {sizeof p, NULL, key, strlen(key), value, strlen(value), &maker, a->put_user};
    if (find(a, "key_len") >= 0) p.key_len = find(a, "key_len");
    if (find(a, "value_len") >= 0) p.value_len = find(a, "value_len");
    error* e = a->put(&p);
    if (e) return e;
    try_args t = {sizeof t, NULL, "nobody", 6, &maker, a->try_user, NULL, 0, NULL};
    e = a->try_get(&t);
    if (!e) return fail(13, "a key that nobody put was found");
    if (e->code != 5) return e;
    free(e);
    int timeout = find(a, "timeout_ms") >= 0 ? (int)find(a, "timeout_ms") : 10000;
    snprintf(key, sizeof key, "address/%d", (node + 1) % nodes);
    get_args g = {sizeof g, NULL, key, strlen(key), timeout, &maker, a->get_user, NULL, 0, NULL};
    e = a->get(&g);
    if (e) return e;
    snprintf(c->greeting, sizeof c->greeting, "%.*s", (int)g.value_len, g.value);
    g.release(g.value);
  }
  a->client = c;
  return NULL;
}

static error* platform_name(word* a) { a[3] = (word) "fake"; a[4] = 4; return NULL; }
static error* platform_version(word* a) {
  client* c = (client*)a[2];
  a[3] = (word)c->greeting;
  a[4] = strlen(c->greeting);
  return NULL;
}
static error* process_index(word* a) { *(int*)&a[3] = ((client*)a[2])->node; return NULL; }
static error* no_list(word* a) { a[3] = 0; a[4] = 0; return NULL; }
static error* attributes(word* a) { a[2] = 0; a[3] = 0; return NULL; }

typedef struct {
  size_t size; int task; uint64_t incarnation; int state; int code; const char* text; size_t len;
} process;

// update_processes gives back what it was told, so that a test can read it.
static error* update_processes(word* a) {
  process* p = (process*)a[3];
  char text[256] = "";
  for (size_t i = 0; i < a[4]; i++) {
    char one[80];
    snprintf(one, sizeof one, "[%d %llu %d %d %.*s]", p[i].task, (unsigned long long)p[i].incarnation,
             p[i].state, p[i].code, (int)p[i].len, p[i].text);
    strncat(text, one, sizeof text - strlen(text) - 1);
  }
  return fail(3, text);
}

static struct {
  size_t size;
  void* ext;
  struct { size_t size; void* ext; int major, minor; } version;
  error* (*fn[SLOTS])(word*);
} api;

void* GetPjrtApi(void) {
  api.size = sizeof api;
  api.version.size = sizeof api.version;
  api.version.major = MAJOR;
  api.version.minor = MINOR;
  for (int i = 0; i < SLOTS; i++) api.fn[i] = missing;
  api.fn[0] = error_destroy;
  api.fn[1] = error_message;
  api.fn[2] = error_code;
  api.fn[3] = ok;
  api.fn[4] = attributes;
  api.fn[10] = client_create;
  api.fn[11] = ok;
  api.fn[12] = platform_name;
  api.fn[13] = process_index;
  api.fn[14] = platform_version;
  api.fn[15] = no_list;
  api.fn[16] = no_list;
  if (SLOTS > 113) api.fn[113] = update_processes;
  return &api;
}
