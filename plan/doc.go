// Package plan turns a few lines of JSON into a [Plan], which describes how a model is parallelized
// over a cluster: the size of each axis, what is sharded and what is replicated along it, and what
// is saved, recomputed or offloaded.
//
// A plan is versioned, and a person can write it. It does not say what programs look like; package
// spmd derives them.
//
//	{
//	  "version": 1,
//	  "model": "llama3.1-8b",
//	  "cluster": "8xb200",
//	  "seq": 8192,
//	  "batch": 64,
//	  "microbatches": 4,
//	  "fsdp": {"size": 4, "zero": 3, "gather": "layer"},
//	  "tp": {"size": 2, "sequence": true},
//	  "recompute": ["norm", "attn", "mlp"],
//	  "types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}
//	}
//
// An axis of one device may be left out, and "fsdp": 4 is short for "fsdp": {"size": 4}.
package plan
