// Package malloc turns a process into one whose C memory stays with it.
//
// XLA's CPU engine allocates the memory of a step anew in every run. By default glibc gives it back
// to the kernel in between, and the next step pays for every page again: 148,000 faults and a
// quarter of a second in a step of a 13M-parameter model. Settings made by mallopt come too late
// for the number of arenas, and threads of their own arenas keep the fault; settings made by
// environment are read when the process begins. So the process begins again.
package malloc
