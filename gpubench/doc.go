// Package gpubench turns the operations of a model's layer into their times on a GPU of this host:
// with kernels of our own, without them, by the cost model, and by torch.compile.
//
// GEMMs and attention are taken from the model's graph, one program each. A layer is the time of a
// gradient program of six layers less one of four, halved: embeddings and the output layer are in
// both. PyTorch, where a Python with torch is named, runs the same sizes in bfloat16 by
// torch.compile in mode max-autotune.
package gpubench
