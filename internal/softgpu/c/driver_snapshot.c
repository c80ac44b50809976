// Launching graphs, and capturing streams into them.
#include <stdlib.h>
#include <string.h>

#include "driver_graph.h"

// ---- launches

// A step is a node of a launched graph; a child graph is spread out into its nodes.
struct step {
  struct work work;
  size_t *needs;  // earlier steps
  size_t needs_count;
};

// A snapshot is a graph as it was when it was launched: updates of the instance, and even its end,
// are for later launches.
struct snapshot {
  atomic_int holders;
  struct step *steps;
  size_t count, room;
  struct record *before;  // the launch before of the same instance, or NULL
  struct record *done;
};

static size_t add_step(struct snapshot *s, struct work work, const size_t *needs, size_t count) {
  if (s->count == s->room) {
    s->room = s->room ? 2 * s->room : 64;
    s->steps = realloc(s->steps, s->room * sizeof *s->steps);
  }
  struct step *step = &s->steps[s->count];
  *step = (struct step){.work = work, .needs = malloc((count + 1) * sizeof *needs),
                        .needs_count = count};
  if (count) memcpy(step->needs, needs, count * sizeof *needs);
  return s->count++;
}

// spread adds the nodes of a graph. All of them come behind the step enter, unless that is none,
// and the result is a step behind all of them.
enum { NONE = -1 };
static size_t spread(struct snapshot *s, CUgraph g, long enter) {
  size_t *step_of = malloc((g->count + 1) * sizeof *step_of);
  size_t *needs = malloc((g->count + 1) * sizeof *needs);
  struct work empty = {.kind = WORK_EMPTY};
  for (size_t i = 0; i < g->count; i++) {
    CUgraphNode n = g->nodes[i];
    size_t k = 0;
    for (; k < n->needs_count; k++) needs[k] = step_of[n->needs[k]->at];
    if (k == 0 && enter != NONE) needs[k++] = (size_t)enter;
    if (n->child)
      step_of[i] = spread(s, n->child, (long)add_step(s, empty, needs, k));
    else
      step_of[i] = add_step(s, sg_work_keep(&n->work), needs, k);
  }
  size_t last = add_step(s, empty, step_of, g->count);
  free(step_of);
  free(needs);
  return last;
}

struct snapshot *sg_snapshot_hold(struct snapshot *s) {
  atomic_fetch_add(&s->holders, 1);
  return s;
}

void sg_snapshot_drop(struct snapshot *s) {
  if (atomic_fetch_sub(&s->holders, 1) > 1) return;
  for (size_t i = 0; i < s->count; i++) {
    sg_work_drop(&s->steps[i].work);
    free(s->steps[i].needs);
  }
  free(s->steps);
  sg_record_drop(s->before);
  sg_record_drop(s->done);
  free(s);
}

// ready tells whether a step may run. Host functions keep the order in which they were added: those
// of the software NCCL wait for other GPUs, which a GPU could not do for two at the same time.
static bool ready(const struct snapshot *s, const bool *done, size_t at) {
  const struct step *step = &s->steps[at];
  for (size_t i = 0; i < step->needs_count; i++)
    if (!done[step->needs[i]]) return false;
  for (size_t i = 0; step->work.kind == WORK_HOST && i < at; i++)
    if (s->steps[i].work.kind == WORK_HOST && !done[i]) return false;
  return true;
}

// Nodes without a path between them may run in any order. Usually it is the order in which they
// were added; with SOFTGPU_DELAY_SEED it is a random one.
static void run_shuffled(struct snapshot *s, struct CUstream_st *stream) {
  bool *done = calloc(s->count + 1, sizeof *done);
  for (size_t left = s->count; left; left--) {
    size_t choices = 0, chosen = 0;
    for (size_t i = 0; i < s->count; i++)
      if (!done[i] && ready(s, done, i) && sg_random(stream) % ++choices == 0) chosen = i;
    sg_work_run(&s->steps[chosen].work, stream);
    done[chosen] = true;
  }
  free(done);
}

void sg_snapshot_run(struct snapshot *s, struct CUstream_st *stream) {
  if (s->before) sg_record_wait(s->before);
  if (sg_shuffled())
    run_shuffled(s, stream);
  else
    for (size_t i = 0; i < s->count; i++) sg_work_run(&s->steps[i].work, stream);
  sg_record_happen(s->done);
}

// Two launches of one instance do not overlap, on different streams neither.
SG_EXPORT CUresult cuGraphLaunch(CUgraphExec x, CUstream handle) {
  struct CUstream_st *stream;
  CUresult result = sg_stream(handle, &stream);
  if (result) return result;
  if (stream->capture) sg_fail("launching a graph while its stream captures");
  struct snapshot *s = calloc(1, sizeof *s);
  atomic_store(&s->holders, 1);
  s->done = sg_record_new();
  pthread_mutex_lock(&x->lock);
  spread(s, x->graph, NONE);
  s->before = x->last;
  x->last = sg_record_hold(s->done);
  result = sg_submit(stream, (struct work){.kind = WORK_GRAPH, .snapshot = s});
  pthread_mutex_unlock(&x->lock);
  return result;
}

// Uploading prepares a launch and does nothing else.
SG_EXPORT CUresult cuGraphUpload(CUgraphExec x, CUstream handle) {
  struct CUstream_st *stream;
  (void)x;
  return sg_stream(handle, &stream);
}

// ---- capture

// Calls on a stream that captures become nodes: each needs the one before on the stream, and what
// the stream waited for.
static CUgraphNodeType type_of(enum work_kind kind) {
  switch (kind) {
    case WORK_KERNEL: return CU_GRAPH_NODE_TYPE_KERNEL;
    case WORK_COPY: return CU_GRAPH_NODE_TYPE_MEMCPY;
    case WORK_SET: return CU_GRAPH_NODE_TYPE_MEMSET;
    case WORK_HOST: return CU_GRAPH_NODE_TYPE_HOST;
    default: sg_fail("capturing work of kind %d", (int)kind);
  }
}

CUresult sg_capture_add(struct CUstream_st *s, struct work work) {
  CUgraphNode n = sg_node_new(s->capture->graph, type_of(work.kind), work, NULL, s->frontier,
                              s->frontier_count);
  sg_frontier(&s->frontier, &s->frontier_count, &n, 1);
  return CUDA_SUCCESS;
}

void sg_capture_join(struct CUstream_st *s, struct capture *capture, const CUgraphNode *nodes,
                     size_t count) {
  size_t n = s->capture ? s->frontier_count : 0;
  CUgraphNode *both = malloc((n + count + 1) * sizeof *both);
  if (n) memcpy(both, s->frontier, n * sizeof *both);
  for (size_t i = 0; i < count; i++) {
    bool known = false;
    for (size_t k = 0; k < n; k++) known = known || both[k] == nodes[i];
    if (!known) both[n++] = nodes[i];
  }
  s->capture = capture;
  sg_frontier(&s->frontier, &s->frontier_count, both, n);
  free(both);
}

static CUresult begin(CUstream handle, CUgraph graph, const CUgraphNode *needs, size_t count) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (s == s->gpu->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  static atomic_ullong next_id = 1;
  struct capture *c = calloc(1, sizeof *c);  // not freed: events point at it
  *c = (struct capture){.graph = graph, .origin = s, .id = atomic_fetch_add(&next_id, 1)};
  sg_frontier(&s->frontier, &s->frontier_count, needs, count);
  s->capture = c;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  (void)mode;  // which calls of other threads would be errors
  CUgraph graph;
  cuGraphCreate(&graph, 0);
  return begin(stream, graph, NULL, 0);
}

SG_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph,
                                               const CUgraphNode *needs,
                                               const CUgraphEdgeData *edges, size_t count,
                                               CUstreamCaptureMode mode) {
  (void)mode;
  for (size_t i = 0; i < count; i++)
    if (needs[i]->graph != graph) return CUDA_ERROR_INVALID_VALUE;
  if (!sg_edges_played(edges, count)) sg_fail("capturing behind an edge of an unknown type");
  return begin(stream, graph, needs, count);
}

// Streams that joined the capture must have been waited for by the one that began it: each of their
// last nodes must be among what its next node would need, or before that.
static bool reaches(CUgraphNode from, CUgraphNode node) {
  if (from == node) return true;
  for (size_t i = 0; i < from->needs_count; i++)
    if (reaches(from->needs[i], node)) return true;
  return false;
}

static bool joined(const struct CUstream_st *origin, const struct CUstream_st *other) {
  for (size_t i = 0; i < other->frontier_count; i++) {
    bool found = false;
    for (size_t k = 0; k < origin->frontier_count; k++)
      found = found || reaches(origin->frontier[k], other->frontier[i]);
    if (!found) return false;
  }
  return true;
}

SG_EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  struct capture *c = s->capture;
  *graph = NULL;
  if (!c) return CUDA_ERROR_INVALID_VALUE;
  if (c->origin != s) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  for (int i = 0; sg_gpu(i); i++) {
    struct gpu *gpu = sg_gpu(i);
    pthread_mutex_lock(&gpu->lock);
    for (struct CUstream_st *other = gpu->streams; other; other = other->next) {
      if (other == s || other->capture != c) continue;
      if (!joined(s, other)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
      other->capture = NULL;
    }
    pthread_mutex_unlock(&gpu->lock);
  }
  s->capture = NULL;
  c->invalid = true;
  if (!result) *graph = c->graph;
  return result;
}

SG_EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  *status = s->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status,
                                             uint64_t *id, CUgraph *graph,
                                             const CUgraphNode **needs,
                                             const CUgraphEdgeData **edges, size_t *count) {
  struct CUstream_st *s;
  CUresult result = sg_stream(handle, &s);
  if (result) return result;
  *status = s->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (!s->capture) return CUDA_SUCCESS;
  if (id) *id = s->capture->id;
  if (graph) *graph = s->capture->graph;
  if (needs) *needs = s->frontier;
  if (edges) *edges = NULL;
  if (count) *count = s->frontier_count;
  return CUDA_SUCCESS;
}

// Which calls are errors while someone captures is not played, so the mode changes nothing.
SG_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  static _Thread_local CUstreamCaptureMode current;
  CUstreamCaptureMode before = current;
  current = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}
