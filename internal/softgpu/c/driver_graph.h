// What building, capturing and launching graphs share.
#ifndef SOFTGPU_DRIVER_GRAPH_H
#define SOFTGPU_DRIVER_GRAPH_H

#include "driver.h"

struct CUgraphNode_st {
  CUgraph graph;
  unsigned long long id;  // the same in a graph and in what was instantiated from it
  CUgraphNodeType type;
  struct work work;
  CUgraph child;       // of a node that is a graph
  CUgraphNode *needs;  // earlier nodes of the same graph
  size_t needs_count;
  size_t at;  // place in the graph
};

struct CUgraph_st {
  CUgraphNode *nodes;
  size_t count, room;
  bool embedded;  // belongs to a node
};

struct CUgraphExec_st {
  pthread_mutex_t lock;
  CUgraph graph;        // its own copy
  struct record *last;  // of the latest launch
};

// sg_node_new adds a node to a graph. It takes the work and the child over.
CUgraphNode sg_node_new(CUgraph graph, CUgraphNodeType type, struct work work, CUgraph child,
                        const CUgraphNode *needs, size_t count);

// sg_edges_played tells whether all edges are of a type that is played.
bool sg_edges_played(const CUgraphEdgeData *edges, size_t count);

#endif
