// `unplayed WHAT` asks the software GPU for something that it does not play. It must not come back.
#include <stdio.h>
#include <string.h>

#include "softcuda.h"

int cuTexRefCreate(void *reference);
int nvmlDeviceGetBoardId(void *device, unsigned *id);
int nvmlSystemGetConfComputeState(void *state);
int cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                     void **extra);

static const char text[] =
    ".version 8.8\n.target sm_100\n.address_size 64\n"
    ".visible .entry strange()\n{\n  .reg .b32 %r<2>;\n  mov.u32 %r1, 1;\n"
    "  unheard.of.u32 %r1, %r1;\n  ret;\n}\n"
    ".visible .entry plain()\n{\n  ret;\n}\n";

static void launch(const void *image, const char *name) {
  CUmodule module;
  CUfunction function;
  if (cuModuleLoadData(&module, image) || cuModuleGetFunction(&function, module, name)) return;
  cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void launch_cluster(void) {
  CUmodule module;
  CUfunction function;
  if (cuModuleLoadData(&module, text) || cuModuleGetFunction(&function, module, "plain")) return;
  CUlaunchAttribute two = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value = {2, 1, 1}};
  CUlaunchConfig config = {2, 1, 1, 1, 1, 1, 0, NULL, &two, 1};
  cuLaunchKernelEx(&config, function, NULL, NULL);
}

static void add_conditional(void) {
  CUgraph graph;
  CUgraphNode node;
  CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
  if (cuGraphCreate(&graph, 0)) return;
  cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &params);
}

int main(int argc, char **argv) {
  CUcontext context;
  if (argc < 2 || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
    return 2;
  const char *what = argv[1];
  static const char binary[64] = "\x7f" "ELF";  // a cubin that nobody marked
  if (!strcmp(what, "function")) cuTexRefCreate(NULL);
  if (!strcmp(what, "nvml")) nvmlDeviceGetBoardId(NULL, NULL);
  if (!strcmp(what, "binary")) launch(binary, "secret");
  if (!strcmp(what, "instruction")) launch(text, "strange");
  if (!strcmp(what, "conditional")) add_conditional();
  if (!strcmp(what, "cluster")) launch_cluster();
  if (!strcmp(what, "refused")) return nvmlSystemGetConfComputeState(NULL) == 3 ? 0 : 1;
  puts("it came back");
  return 1;
}
