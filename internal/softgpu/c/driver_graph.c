// CUDA graphs: building them, capturing streams into them, instantiating, updating and launching.
#include <stdlib.h>
#include <string.h>

#include "driver_graph.h"

static atomic_ullong next_id = 1;

// ---- building

CUgraphNode sg_node_new(CUgraph g, CUgraphNodeType type, struct work work, CUgraph child,
                            const CUgraphNode *needs, size_t count) {
  CUgraphNode n = calloc(1, sizeof *n);
  *n = (struct CUgraphNode_st){.graph = g, .id = atomic_fetch_add(&next_id, 1), .type = type,
                               .work = work, .child = child, .at = g->count};
  sg_frontier(&n->needs, &n->needs_count, needs, count);
  if (g->count == g->room) {
    g->room = g->room ? 2 * g->room : 16;
    g->nodes = realloc(g->nodes, g->room * sizeof *g->nodes);
  }
  g->nodes[g->count++] = n;
  return n;
}

void sg_frontier(CUgraphNode **list, size_t *count, const CUgraphNode *nodes, size_t n) {
  CUgraphNode *fresh = n ? malloc(n * sizeof *fresh) : NULL;
  if (n) memcpy(fresh, nodes, n * sizeof *fresh);
  free(*list);
  *list = fresh;
  *count = n;
}

SG_EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  *graph = calloc(1, sizeof **graph);
  return CUDA_SUCCESS;
}

static void destroy(CUgraph g) {
  for (size_t i = 0; i < g->count; i++) {
    CUgraphNode n = g->nodes[i];
    sg_work_drop(&n->work);
    if (n->child) destroy(n->child);
    free(n->needs);
    free(n);
  }
  free(g->nodes);
  free(g);
}

SG_EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  if (graph->embedded) return CUDA_ERROR_INVALID_VALUE;
  destroy(graph);
  return CUDA_SUCCESS;
}

// clone copies a graph and its children. What is instantiated keeps the ids of the nodes, so that
// updates find them; what is embedded gets its own.
static CUgraph clone(CUgraph g, bool same_ids) {
  CUgraph copy = calloc(1, sizeof *copy);
  copy->embedded = !same_ids;
  for (size_t i = 0; i < g->count; i++) {
    CUgraphNode n = g->nodes[i];
    CUgraph child = n->child ? clone(n->child, same_ids) : NULL;
    if (child) child->embedded = true;
    CUgraphNode m = sg_node_new(copy, n->type, sg_work_keep(&n->work), child, NULL, 0);
    if (same_ids) m->id = n->id;
    sg_frontier(&m->needs, &m->needs_count, n->needs, n->needs_count);
    for (size_t k = 0; k < m->needs_count; k++) m->needs[k] = copy->nodes[n->needs[k]->at];
  }
  return copy;
}

// The parameters of nodes, made into work.

static CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS *p, struct work *work) {
  CUfunction f = p->func ? p->func : (CUfunction)p->kern;  // a kernel of a library is a function
  work->kind = WORK_KERNEL;
  return sg_launch_new(&work->launch, f, (unsigned[]){p->gridDimX, p->gridDimY, p->gridDimZ},
                       (unsigned[]){p->blockDimX, p->blockDimY, p->blockDimZ}, p->sharedMemBytes,
                       p->kernelParams, p->extra);
}

static CUresult copy_work(const CUDA_MEMCPY3D *p, struct work *work) {
  if (p->Height > 1 || p->Depth > 1 || p->srcXInBytes || p->dstXInBytes || p->srcY || p->dstY ||
      p->srcZ || p->dstZ)
    sg_fail("a graph's copy of more than one row");
  if (p->srcMemoryType == CU_MEMORYTYPE_ARRAY || p->dstMemoryType == CU_MEMORYTYPE_ARRAY)
    sg_fail("a graph's copy of a texture");
  work->kind = WORK_COPY;
  work->copy.to =
      p->dstMemoryType == CU_MEMORYTYPE_HOST ? p->dstHost : (void *)(uintptr_t)p->dstDevice;
  work->copy.from =
      p->srcMemoryType == CU_MEMORYTYPE_HOST ? p->srcHost : (void *)(uintptr_t)p->srcDevice;
  work->copy.bytes = p->WidthInBytes;
  work->copy.staged = NULL;
  return CUDA_SUCCESS;
}

static CUresult set_work(const CUDA_MEMSET_NODE_PARAMS *p, struct work *work) {
  if (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4)
    return CUDA_ERROR_INVALID_VALUE;
  work->kind = WORK_SET;
  work->set.to = (void *)(uintptr_t)p->dst;
  work->set.value = p->value;
  work->set.width = p->elementSize;
  work->set.columns = p->width;
  work->set.rows = p->height;
  work->set.pitch = p->pitch;
  return CUDA_SUCCESS;
}

static CUresult node_work(const CUgraphNodeParams *p, struct work *work) {
  *work = (struct work){.kind = WORK_EMPTY};
  switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: return kernel_work(&p->kernel, work);
    case CU_GRAPH_NODE_TYPE_MEMCPY: return copy_work(&p->memcpy.copyParams, work);
    case CU_GRAPH_NODE_TYPE_MEMSET: return set_work(&p->memset, work);
    case CU_GRAPH_NODE_TYPE_HOST:
      *work = (struct work){.kind = WORK_HOST, .host = {p->host.fn, p->host.userData}};
      return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
    case CU_GRAPH_NODE_TYPE_EMPTY: return CUDA_SUCCESS;
    default: sg_fail("a graph's node of type %d", (int)p->type);
  }
}

// An edge of the programmatic type lets a kernel begin before the one it needs has ended, up to the
// instruction that waits for it. To wait before the beginning is one of the ways in which that may
// come out; a kernel that forgets to wait is not found here.
bool sg_edges_played(const CUgraphEdgeData *edges, size_t count) {
  for (size_t i = 0; edges && i < count; i++)
    if (edges[i].type != CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC &&
        (edges[i].from || edges[i].to || edges[i].type))
      return false;
  return true;
}

// check looks at the nodes that a new one needs.
static CUresult check(CUgraph g, const CUgraphNode *needs, const CUgraphEdgeData *edges,
                      size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!needs || needs[i]->graph != g) return CUDA_ERROR_INVALID_VALUE;
  if (!sg_edges_played(edges, count)) sg_fail("an edge of a graph of an unknown type");
  return CUDA_SUCCESS;
}

static CUresult add_child(CUgraphNode *node, CUgraph g, const CUgraphNode *needs, size_t count,
                          CUgraph child, bool move) {
  if (!child || (move && child->embedded)) return CUDA_ERROR_INVALID_VALUE;
  if (!move) child = clone(child, false);
  child->embedded = true;
  *node = sg_node_new(g, CU_GRAPH_NODE_TYPE_GRAPH, (struct work){.kind = WORK_EMPTY}, child, needs,
                   count);
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph g, const CUgraphNode *needs,
                                     const CUgraphEdgeData *edges, size_t count,
                                     CUgraphNodeParams *params) {
  CUresult result = check(g, needs, edges, count);
  if (result) return result;
  if (params->type == CU_GRAPH_NODE_TYPE_GRAPH)
    return add_child(node, g, needs, count, params->graph.graph,
                     params->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
  struct work work;
  if ((result = node_work(params, &work))) return result;
  *node = sg_node_new(g, params->type, work, NULL, needs, count);
  return CUDA_SUCCESS;
}

// The child is copied now: changing it afterwards does not change the graph.
SG_EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph g, const CUgraphNode *needs,
                                            size_t count, CUgraph child) {
  CUresult result = check(g, needs, NULL, count);
  return result ? result : add_child(node, g, needs, count, child, false);
}

SG_EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph g, const CUgraphNode *needs,
                                       size_t count) {
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
  return cuGraphAddNode_v2(node, g, needs, NULL, count, &p);
}

SG_EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph g, const CUgraphNode *needs,
                                           size_t count, const CUDA_KERNEL_NODE_PARAMS *kernel) {
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *kernel};
  return cuGraphAddNode_v2(node, g, needs, NULL, count, &p);
}

SG_EXPORT CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph g, const CUgraphNode *needs,
                                      size_t count, const CUDA_HOST_NODE_PARAMS *host) {
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = *host};
  return cuGraphAddNode_v2(node, g, needs, NULL, count, &p);
}

// ---- reading

SG_EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type) {
  *type = node->type;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) {
  if (!node->child) return CUDA_ERROR_INVALID_VALUE;
  *graph = node->child;
  return CUDA_SUCCESS;
}

// list writes as many nodes as there is room for; without a list it counts.
static CUresult list(CUgraph g, bool roots_only, CUgraphNode *nodes, size_t *count) {
  size_t n = 0;
  for (size_t i = 0; i < g->count; i++) {
    if (roots_only && g->nodes[i]->needs_count) continue;
    if (nodes && n < *count) nodes[n] = g->nodes[i];
    n++;
  }
  for (size_t i = n; nodes && i < *count; i++) nodes[i] = NULL;
  if (!nodes || n < *count) *count = n;
  return CUDA_SUCCESS;
}

SG_EXPORT CUresult cuGraphGetNodes(CUgraph g, CUgraphNode *nodes, size_t *count) {
  return list(g, false, nodes, count);
}

SG_EXPORT CUresult cuGraphGetRootNodes(CUgraph g, CUgraphNode *nodes, size_t *count) {
  return list(g, true, nodes, count);
}

SG_EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *needs,
                                                 CUgraphEdgeData *edges, size_t *count) {
  size_t n = node->needs_count;
  for (size_t i = 0; needs && i < *count && i < n; i++) needs[i] = node->needs[i];
  if (edges) memset(edges, 0, *count * sizeof *edges);
  if (!needs || n < *count) *count = n;
  return CUDA_SUCCESS;
}

// ---- instantiating and updating

// USE_NODE_PRIORITY says which of two nodes that are ready runs first; here any may.
#define NODE_PRIORITY 8ull

// An instance is a copy: changing the graph afterwards does not change it.
SG_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph g,
                                               unsigned long long flags) {
  if (flags & ~NODE_PRIORITY) sg_fail("instantiating a graph with flags %llu", flags);
  CUgraphExec x = calloc(1, sizeof *x);
  pthread_mutex_init(&x->lock, NULL);
  x->graph = clone(g, true);
  *exec = x;
  return CUDA_SUCCESS;
}

// A launch that still runs has its own copy of everything.
SG_EXPORT CUresult cuGraphExecDestroy(CUgraphExec x) {
  destroy(x->graph);
  sg_record_drop(x->last);
  pthread_mutex_destroy(&x->lock);
  free(x);
  return CUDA_SUCCESS;
}

static CUgraphNode find(CUgraph g, unsigned long long id) {
  for (size_t i = 0; i < g->count; i++) {
    CUgraphNode n = g->nodes[i], inner;
    if (n->id == id) return n;
    if (n->child && (inner = find(n->child, id))) return inner;
  }
  return NULL;
}

// refill gives the nodes of one graph the work of another of the same form.
static CUresult refill(CUgraph to, CUgraph from) {
  if (to->count != from->count) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  for (size_t i = 0; i < to->count; i++) {
    CUgraphNode a = to->nodes[i], b = from->nodes[i];
    if (a->type != b->type || a->needs_count != b->needs_count)
      return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    CUresult result = a->child ? refill(a->child, b->child) : CUDA_SUCCESS;
    if (result) return result;
    struct work fresh = sg_work_keep(&b->work);
    sg_work_drop(&a->work);
    a->work = fresh;
  }
  return CUDA_SUCCESS;
}

// Updates are for later launches; those that were called before are not disturbed.
SG_EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec x, CUgraphNode node,
                                            CUgraphNodeParams *params) {
  struct work work;
  CUresult result = node_work(params, &work);
  if (result) return result;
  pthread_mutex_lock(&x->lock);
  CUgraphNode n = find(x->graph, node->id);
  if (!n || n->type != params->type) {
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (n->child) {
    result = refill(n->child, params->graph.graph);
  } else {
    struct work old = n->work;
    n->work = work;
    work = old;
  }
  pthread_mutex_unlock(&x->lock);
  sg_work_drop(&work);
  return result;
}

SG_EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec x, CUgraphNode node,
                                                     const CUDA_KERNEL_NODE_PARAMS *kernel) {
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *kernel};
  return cuGraphExecNodeSetParams(x, node, &p);
}

SG_EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec x, CUgraphNode node,
                                                      CUgraph child) {
  CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .graph = {.graph = child}};
  return cuGraphExecNodeSetParams(x, node, &p);
}

SG_EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec x, CUgraph g,
                                        CUgraphExecUpdateResultInfo *info) {
  pthread_mutex_lock(&x->lock);
  CUresult result = refill(x->graph, g);
  pthread_mutex_unlock(&x->lock);
  *info = (CUgraphExecUpdateResultInfo){.result = result ? 1 : 0};
  return result;
}
