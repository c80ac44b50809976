// Package deepwell turns a model into a trained checkpoint on NVIDIA Blackwell, one verb at a time:
// every method of [Env] is a command and reads as the list of its passes. Most take a Job, write an
// artifact and return a Result; some only look, as Doctor and ListCheckpoints. Flags and text are
// the business of cmd/deepwell.
//
// To train from a program of your own, with your own data or model, use package train;
// examples/library does. To run StableHLO, use package engine.
//
// A program passes through these:
//
//	model → ir.Graph → ir.Grad → spmd (the graphs of one device) → rewrite → lower
//	→ program.Module → engine.Executable → pipeline, train
//
// A package imports only packages above it in this list. layout_test.go checks it.
//
//	0  diag        errors: code, what, where, fix, exit class
//	   dtype       element types and shapes; casts
//	   dtype/block codec of block-scaled formats: MXFP8, NVFP4
//	   schedule    pipeline schedules as lists; validator, bubbles
//	1  event       typed events; JSON lines, plain lines, one live line
//	   safetensors reader, writer
//	   jinja       chat templates of models, run
//	   tokenizer   text to token ids and back: tokenizer.json, SentencePiece; trains byte-level BPE
//	   machine     catalogue of GPUs and clusters, Target, probe → machine.json
//	   plugin      engines on disk: installed by name, pinned, verified
//	   hlo         XLA's optimized program → its collectives, kernel calls and schedule
//	   internal/   flat (values between processes), atomicfile, plainfile (nothing is written
//	               through a link), flock, safedir (paths that stay inside a folder), cas, nvml,
//	               stubcuda, hlotest (writes optimized programs for tests), pjrt (the C
//	               interface; nothing else knows an offset), malloc (C memory that is not
//	               returned to the system), tfevents (for TensorBoard), trace (for Perfetto),
//	               parquet (texts of columns)
//	2  program     what an engine runs: modules, text, arguments, donation, devices
//	   ir          typed graph: repeats, named dimensions, placements; verify, print, parse, gradient
//	   ir/eval     an interpreter in float64, against which gradients and lowerings are tested
//	   internal/irtest  graphs that use every operation, for tests
//	   chat        rows of data as people have them to texts and conversations
//	   data        text files to token sequences; one position, whatever the number of ranks
//	   link        messages and arrays between processes, authenticated; heartbeats
//	3  engine      compile, cache, arrays, run; compile for clusters that are not at hand
//	   optim       AdamW, Muon and schedules as graph builders
//	   model       architectures, presets, counts, parameters with their layouts
//	   ckpt        sharded training state to a folder, and back to any number of devices
//	   recipe      run.toml to a checked recipe
//	   overlap     a scheduled program → how much communication is hidden behind compute
//	   precision/monitor  statistics of steps → which GEMM falls back to BF16, and when it returns
//	4  capture/pt2  the archive of torch.export.save → a typed program and its tensors
//	   capture     the name of a model → configuration and weights; parameters → Hugging Face
//	   internal/isolate  modules and a cluster → reports, from a process that may crash
//	   plan        how a model is spread over devices → plan.json
//	   kernels     a target and an operation → the kernel that runs it
//	   precision   a precision policy → the format of each GEMM of a model
//	   quantize    a checkpoint → one whose weights are quantized
//	   internal/room    files of a host → free memory and disk of this process
//	   price       operations and collectives on a machine → seconds, by software stack
//	5  spmd        a loss and an optimizer → the graphs that one device runs
//	   rewrite     per-device graph → one that a target runs well: passes by target
//	   lower       a per-device graph → StableHLO: rewrites, picks each operation's kernel, prints
//	   lower/stablehlo  the printer: instructions, plain rules; rows of kernels
//	   lower/quantized  quantization and block-scaled GEMMs, on every target
//	   lower/cpu   kernels of XLA:CPU, a row each
//	   lower/gpu   kernels of XLA:GPU and cuDNN, a row each
//	   cost        a device's graph → its bill: GEMMs, streams, collectives, buffers
//	   estimate    a plan, its bill and prices → time and memory of a step
//	6  dryrun      a schedule and prices → a timeline: time, waits, memory, money; report, trace
//	   internal/selftest  small programs with known results
//	   internal/enginetest     runs graphs on the CPU engine, for tests
//	7  pipeline    a schedule and the programs of stages → a run, over links between devices
//	   step        a model, a plan and a policy → the programs of a step; its passes
//	   autoplan    a model, a cluster and a goal → the best plans; other stacks' plans in and out
//	   call        an exported program → forward and backward passes for another process
//	8  train       the loop: steps, guards, checkpoints, rerun of skipped steps, BF16 fallback
//	   report      the events of runs → a page, as a file or served while runs go on
//	   parity      a recipe and several precisions → paired curves and a verdict
//	9  deepwell    this package
//	   cmd/deepwell     one file per command
package deepwell
