// Package deepwell turns a model into a trained checkpoint on NVIDIA Blackwell, one verb at a
// time: every function of [Env] is a command, reads as the list of its passes, and leaves an
// artifact behind.
//
// Data runs down this list; a package imports only from rows above its own. layout_test.go holds
// the table.
//
//	0  diag        errors: code, what, where, fix, exit class
//	   dtype       element types and shapes; casts
//	   dtype/block numbers in blocks that share a scale: MXFP8, NVFP4
//	   schedule    pipeline schedules as lists; validator, bubbles
//	1  event       typed events; JSON lines, plain lines, one live line
//	   safetensors reader, writer
//	   tokenizer   text to token ids and back: tokenizer.json, SentencePiece; trains byte-level BPE
//	   machine     catalogue of cards and clusters, Target, probe → machine.json
//	   plugin      engines on disk: installed by name, pinned, verified
//	   hlo         XLA's optimized program → its collectives, kernel calls and schedule
//	   internal/   atomicfile, plainfile (nothing is written through a link), flock, folder (files
//	               that do not lead out of one), cas, nvml, stubcuda, hlotest (writes
//	               optimized programs for tests), pjrt (the C interface;
//	               nothing else knows an offset), resident (memory that stays),
//	               tfevents (for TensorBoard), trace (for Perfetto), parquet (texts of columns)
//	2  program     what an engine runs: stages, text, arguments, donation, devices
//	   ir          typed graph: repeats, named dimensions, placements; verify, print, parse, gradient
//	   ir/eval     the graph in float64, slowly: what gradients and lowerings are tested against
//	   internal/irtest  graphs that use every operation, for tests
//	   data        text files to rows of tokens; one position, whatever the number of ranks
//	   link        messages and arrays between processes, authenticated; heartbeats
//	3  engine      compile, cache, arrays, run; compile for machines that are not there
//	   optim       AdamW, Muon and schedules as graph builders
//	   model       architectures, presets, counts, parameters with their layouts
//	   ckpt        slices of a running state to a folder that can be resumed from, and back
//	   recipe      run.toml to a checked recipe
//	   overlap     a scheduled program → what of its communication is hidden behind compute
//	   watch       what steps report → which product of which layer falls back, and when it returns
//	4  capture     the name of a model → configuration and weights; parameters → Hugging Face
//	   internal/isolate  stages and a cluster → reports, from a process that may crash
//	   plan        how a model is spread over devices → plan.json
//	   kernels     what a target takes, for the table of kernels in lower
//	   precision   a word for a precision → what each product of a model is computed in
//	   narrow      a checkpoint → one whose weights are quantized
//	   internal/room    files of a host → memory and disk that are left for this process
//	   price       operations and collectives on a machine → seconds, by software stack
//	5  spmd        a loss and an optimizer → the graphs that one device runs
//	   rewrite     per-device graph → one that a target runs well: passes by target
//	   lower       a rewritten graph → StableHLO text; it only prints
//	   lower/stablehlo  the printer: instructions, plain rules; rows of kernels
//	   lower/quantized  quantization and block-scaled products, on every target
//	   lower/cpu   kernels of XLA:CPU, a row each
//	   lower/gpu   kernels of XLA:GPU and cuDNN, a row each
//	   cost        a device's graph → its bill: products, streams, collectives, buffers
//	   estimate    a plan, its bill and prices → time and memory of a step
//	6  dryrun      a schedule and prices → a timeline: time, waits, memory, money; report, trace
//	   internal/check   small programs whose answers are known
//	   internal/enginetest     graphs to numbers on the CPU engine, for tests
//	7  pipeline    a schedule and the programs of stages → a run, over links between devices
//	   step        a model, a plan and a policy → the programs of a step; its passes
//	   autoplan    a model, a cluster and a goal → the best plans; other stacks' plans in and out
//	8  train       the loop, guards, checkpoints, replay; falls back where few bits do not do
//	   parity      a recipe and several precisions → paired curves and a verdict
//	9  deepwell    this package
//	   cmd/deepwell     one file per command
package deepwell
