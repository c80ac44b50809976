// Package plan turns a few lines of JSON into how a model is trained on a cluster: the size of
// each axis of parallelism, what is sharded and what is replicated along it, and what is saved,
// recomputed or offloaded.
//
// A [Plan] is an artifact like every other: a person can write it, it is versioned, and it prints
// and parses itself. It does not say what programs look like; package spmd derives them.
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
