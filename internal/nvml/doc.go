// Package nvml turns the NVIDIA driver at hand into a snapshot of its devices: what they are, how
// much memory they have, how MIG partitions them, and how they are wired to each other.
//
// NVML is a shared library that comes with the driver (libnvidia-ml.so.1). [Read] loads it without
// cgo, asks everything once, and lets go of it again; nothing stays open. A driver is free to lack
// a function or to answer that a GPU does not support a question: the field is then its zero
// value, which always means "not known", and reading goes on. What the driver answers with a real
// error, such as a GPU that fell off the bus, is kept in [Device.Faults], so that one lost GPU
// does not hide the other seven.
//
// The layouts in abi.go are the whole of what Deepwell knows about nvml.h.
package nvml
