// Package call turns an exported program into forward and backward passes that another process asks
// for.
//
// The other process is Python: it exports a module, starts this binary with the verb [Verb], and
// calls the program with tensors that both processes have mapped. The engine reads parameters and
// inputs where they are and writes outputs and gradients where they belong; nothing is copied on
// the way but what is saved for a backward pass and returned at once.
//
// # Protocol
//
// Standard input is a socket. A message is its length in four bytes, little-endian, and JSON. Every
// request has a number and gets one answer with that number: what it asked for, or an error. They
// are answered in order.
//
//	map      a block of shared memory: its descriptor comes along, or it has a handle of a GPU's
//	open     an archive of torch.export.save, which may be deleted afterwards
//	bind     where the parameters and buffers of a program are
//	compile  a program for inputs of some sizes, with gradients or without: a variant
//	forward  a call of a variant; what the backward pass needs stays until it is freed
//	backward the gradients of a call, which may be asked for again
//	close    a program
//
// A place is a block and an offset in bytes, a multiple of 64. Every request may also list calls
// and blocks that are done with. A call that has saved something in such a block is over.
//
// # GPUs
//
// A child with the argument [GPU] runs on the first GPU that it sees. Blocks are then allocations
// of the caller on that GPU, each by its handle of cudaIpcGetMemHandle in base64, and offsets are
// multiples of 256, counted from the beginning of the allocation. The engine reads and writes
// there as on the host. The two processes have no common stream: the caller synchronizes with its
// own work before a request, and the engine is done when it has answered. A block may be freed when
// a request that unmaps it is answered, and not before.
//
// # Who ends whom
//
// The process ends when the socket does, or its parent: there is nobody left to answer.
package call
