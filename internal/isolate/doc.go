// Package isolate turns a module for a cluster into what the compiler reports of it, in a process
// that may crash.
//
// XLA ends its process where a library should return an error: an unknown flag, a shape whose size
// overflows, a module that is nested too deeply. So the command compiles in a child: [Open] starts
// the same binary again, and a child serves module after module (`compile` opens two where two
// modules are long). If it crashes, the module that it was compiling gets one coded error (DW2207),
// and the command goes on as after any other.
//
// # Protocol
//
// The child reads requests from its standard input: a line of JSON, and after the line of a module
// the module's text as it is, so that no second copy of it is made. It answers on descriptor 3, one
// line of JSON each: events as package event writes them, and at the end of every request a report,
// an error, or that it is ready. Its standard error is XLA's log.
//
// A [Worker] is the same for other work that may crash: its requests and answers are values of
// whoever opens it, in the bytes of package flat.
//
// # Who ends whom
//
// The child is the leader of its own process group: an interrupt of the terminal reaches the parent
// only, which kills the group, ptxas included. A parent that dies takes the child with it: the
// kernel sends SIGKILL, and standard input ends.
package isolate
