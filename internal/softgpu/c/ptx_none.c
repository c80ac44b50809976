// Stands in for the interpreter until it is there: no kernel can run.
#include "ptx.h"

#define WEAK __attribute__((weak))

WEAK struct ptx_module *ptx_load(const char *text, char **error) {
  (void)text, (void)error;
  static char module;
  return (struct ptx_module *)&module;
}
WEAK void ptx_unload(struct ptx_module *module) { (void)module; }
WEAK struct ptx_kernel *ptx_kernel(struct ptx_module *module, const char *name) {
  (void)name;
  return (struct ptx_kernel *)module;
}
WEAK const char *ptx_kernel_problem(const struct ptx_kernel *kernel) {
  (void)kernel;
  return "there is no interpreter";
}
WEAK unsigned ptx_kernel_params(const struct ptx_kernel *kernel) {
  (void)kernel;
  return 0;
}
WEAK size_t ptx_kernel_param_bytes(const struct ptx_kernel *kernel, unsigned at) {
  (void)kernel, (void)at;
  return 0;
}
WEAK size_t ptx_kernel_shared(const struct ptx_kernel *kernel) {
  (void)kernel;
  return 0;
}
WEAK int ptx_launch(struct ptx_kernel *kernel, const unsigned grid[3], const unsigned block[3],
                    size_t dynamic_shared, void **args, char **error) {
  (void)kernel, (void)grid, (void)block, (void)dynamic_shared, (void)args, (void)error;
  return 1;
}
WEAK void *ptx_global(struct ptx_module *module, const char *name, size_t *bytes) {
  (void)module, (void)name, (void)bytes;
  return 0;
}
