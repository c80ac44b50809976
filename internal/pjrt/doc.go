// Package pjrt turns the C interface of an XLA plugin into Go values with explicit owners.
//
// It speaks PJRT versions 0.81 to 0.116 through purego, without cgo, and is the only package
// that knows an offset. Every PJRT function takes one pointer to an argument structure that
// begins with its own size. We always pass the newest layout we know: a plugin accepts a
// structure that is longer than its own and ignores the tail, and the fields it does not know
// stay zero on the way back. A function that a plugin is too old for lies beyond the size of its
// table, and calling it is a Go error (see abi.go).
//
// # Ownership
//
// A [Plugin] lives as long as the process: XLA cannot be unloaded. A [Client] owns its devices
// and memories. [Buffer], [Executable], [Loaded], [Event] and [Topology] each own one C object
// and are freed by their Free method; using them afterwards is an error, never a crash. A
// Buffer passed to a run that donates it is gone from that moment on. All types are safe for
// use by several goroutines: a Buffer that is freed while a run is being started is destroyed
// when the start is over.
//
// # Memory
//
// Go memory that C may keep beyond a call (zero-copy host buffers, key-value answers) is pinned
// until C says it is done with it. Argument structures hold Go pointers as unsafe.Pointer, so
// what they point to is alive and on the heap during the call.
package pjrt
