// Package plan turns a few lines of JSON into how a model is trained on a cluster: how many devices
// each axis of parallelism has, what is cut and what is copied along it, and what is kept.
//
// A [Plan] is an artifact like every other: a person can write it, it is versioned, and it prints
// and parses itself. It says nothing about how programs look; spmd does with it what it says.
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
