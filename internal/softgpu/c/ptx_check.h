// Which memory a kernel may access. Without a check every address of the process is accessed as it
// stands, and a wrong one ends the process.
#ifndef SOFTGPU_PTX_CHECK_H
#define SOFTGPU_PTX_CHECK_H

#include <stddef.h>

// A range check says whether all bytes from at on belong to one allocation that a kernel may read,
// or write. It is called from the threads that call ptx_launch, once for all lanes of a warp where
// that succeeds. Set it before the first launch.
typedef int (*ptx_range_check)(const void *at, size_t bytes, int write);
extern ptx_range_check ptx_check;

#endif
