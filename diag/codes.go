package diag

import (
	"fmt"
	"strings"
)

// A Code names one kind of failure for good: codes are never reused or renumbered.
type Code string

// Error makes a code a target of errors.Is: errors.Is(err, diag.LinkLost).
func (c Code) Error() string { return string(c) }

// The codes, by area: 10xx the command line, 20xx engines on disk, 21xx the engine at run time,
// 22xx compiling, 23xx programs, 24xx machines, 25xx graphs, 26xx recipes,
// 27xx models and their weights, 28xx data, 29xx checkpoints, 30xx training,
// 32xx pipelines, 33xx precision.
const (
	Internal  Code = "DW1000"
	BadUsage  Code = "DW1001"
	BadInput  Code = "DW1002"
	FileError Code = "DW1003"
	Canceled  Code = "DW1004"
	NotPlain  Code = "DW1005"

	EngineUnknown   Code = "DW2001"
	EngineMissing   Code = "DW2002"
	EngineDigest    Code = "DW2003"
	EngineArchive   Code = "DW2004"
	EngineDownload  Code = "DW2005"
	EngineBusy      Code = "DW2006"
	EngineAPI       Code = "DW2007"
	EngineLoad      Code = "DW2008"
	EngineHost      Code = "DW2009"
	EngineWrite     Code = "DW2010"
	EngineCUDAStub  Code = "DW2011"
	EngineUntrusted Code = "DW2012"
	EngineExposed   Code = "DW2013"

	RuntimeFailed  Code = "DW2101"
	BufferGone     Code = "DW2102"
	BufferMismatch Code = "DW2103"
	ArgumentCount  Code = "DW2104"
	DeviceMismatch Code = "DW2105"
	NotSupported   Code = "DW2106"
	OutOfMemory    Code = "DW2107"
	HandlerFailed  Code = "DW2108"

	CompileFailed Code = "DW2201"
	ProgramText   Code = "DW2202"
	CompileOption Code = "DW2203"
	CacheFailed   Code = "DW2204"
	ProgramRead   Code = "DW2205"
	TooLarge      Code = "DW2206"
	EnvRefused    Code = "DW2208"

	CompilerCrashed Code = "DW2207"

	ProgramFormat  Code = "DW2301"
	ProgramInvalid Code = "DW2302"
	ProgramVersion Code = "DW2303"

	CardUnknown    Code = "DW2401"
	ClusterSpec    Code = "DW2402"
	ProbeFailed    Code = "DW2403"
	MachineVersion Code = "DW2404"
	DoctorFailed   Code = "DW2405"

	GraphInvalid Code = "DW2501"
	GraphText    Code = "DW2502"

	RecipeText    Code = "DW2601"
	RecipeKey     Code = "DW2602"
	RecipeValue   Code = "DW2603"
	RecipeChanged Code = "DW2604"
	RunDiffers    Code = "DW2605"
	PeersDiffer   Code = "DW2606"

	ModelUnknown   Code = "DW2701"
	ModelMissing   Code = "DW2702"
	WeightMismatch Code = "DW2703"
	WeightType     Code = "DW2704"

	WeightQuantized Code = "DW2705"
	WeightNotFinite Code = "DW2706"
	FolderForeign   Code = "DW2707"
	// WeightsIncomplete is for what looks like weights and cannot be read as such, which must never be
	// taken for no weights at all.
	WeightsIncomplete Code = "DW2708"

	DataMissing   Code = "DW2801"
	DataEmpty     Code = "DW2802"
	DataFormat    Code = "DW2803"
	DataTokenizer Code = "DW2804"
	DataCache     Code = "DW2805"
	DataPosition  Code = "DW2806"

	CheckpointMissing Code = "DW2901"
	CheckpointDamaged Code = "DW2902"
	CheckpointVersion Code = "DW2903"
	CheckpointBusy    Code = "DW2904"
	CheckpointWrite   Code = "DW2905"
	CheckpointTensor  Code = "DW2906"
	CheckpointExists  Code = "DW2907"
	CheckpointLink    Code = "DW2908"
	RunBusy           Code = "DW2909"

	TrainingLost Code = "DW3001"
	HostMemory   Code = "DW3002"
	HostDisk     Code = "DW3003"
	RunStalled   Code = "DW3005"

	PlanText    Code = "DW3101"
	PlanKey     Code = "DW3102"
	PlanValue   Code = "DW3103"
	PlanVersion Code = "DW3104"
	PlanMisfit  Code = "DW3105"
	PlanLater   Code = "DW3106"
	PlanNoFit   Code = "DW3107"
	PlanCensus  Code = "DW3108"
	PlanRemat   Code = "DW3109"

	ScheduleUnknown Code = "DW3201"
	ScheduleShape   Code = "DW3202"
	ScheduleInvalid Code = "DW3203"
	ScheduleText    Code = "DW3204"
	ScheduleCosts   Code = "DW3205"
	LinkLost        Code = "DW3206"
	LinkTag         Code = "DW3207"
	LinkShape       Code = "DW3208"
	LinkVersion     Code = "DW3209"
	LinkData        Code = "DW3210"
	LinkStalled     Code = "DW3211"
	PipelineStage   Code = "DW3212"
	LinkKey         Code = "DW3213"

	PolicyText    Code = "DW3301"
	PolicyKey     Code = "DW3302"
	PolicyValue   Code = "DW3303"
	PolicyVersion Code = "DW3304"
	PolicyMisfit  Code = "DW3305"

	ParityMissed   Code = "DW3306"
	ParityUnproven Code = "DW3307"
)

// A row is one entry of the catalogue: what a code means, and one message that shows it.
type row struct {
	code    Code
	class   Class
	meaning string
	example string
}

// catalogue is the only table of codes; docs/errors.md is printed from it.
var catalogue = []row{
	{Internal, Failed, "an error without a code of its own reached the user: a fault in Deepwell",
		"unexpected end of JSON input"},
	{BadUsage, Usage, "the command line is not well formed",
		"unknown flag: --clutser"},
	{BadInput, Usage, "an input file is not what the command reads",
		"x.mlir holds no module"},
	{FileError, Failed, "a file cannot be read or written",
		"cannot read step.mlir"},
	{Canceled, Failed, "the work was stopped by the caller; 130 or 143 if by a signal",
		"stopped while waiting for device 3"},
	{NotPlain, Failed, "a file that is to be written is a link, or not a plain file",
		".lock is a symbolic link, and nothing is written through one"},

	{EngineUnknown, Usage, "there is no engine of that name",
		`no engine is called "cuda"; did you mean "cuda13"?`},
	{EngineMissing, Failed, "an engine that the command needs is not installed",
		`engine "cuda13" is not installed`},
	{EngineDigest, Failed, "a file's SHA-256 is not the pinned one",
		"xla_cpu_pjrt-0.0.1.whl has another SHA-256 than the pinned one"},
	{EngineArchive, Failed, "a wheel is damaged or holds what it must not",
		"wheel entry ../../etc/passwd leaves the engine's folder"},
	{EngineDownload, Failed, "pip could not fetch a pinned package",
		"pip cannot download xla-cpu-pjrt==0.0.1"},
	{EngineBusy, Failed, "another process is installing the same engine",
		`engine "cpu" is being installed by process 4711`},
	{EngineAPI, Failed, "a plugin speaks a PJRT version outside the supported range",
		"plugin speaks PJRT 1.3; Deepwell speaks 0.81 to 0.116"},
	{EngineLoad, Failed, "a plugin or a library it needs cannot be loaded",
		"cannot load xla_cpu_pjrt.so"},
	{EngineHost, Failed, "no engine is pinned for this operating system and processor",
		`engine "cpu" is not available for darwin/arm64`},
	{EngineWrite, Failed, "the engine's folder cannot be written",
		"cannot create the engine folder: read-only file system"},
	{EngineCUDAStub, Failed, "the stand-in for the CUDA driver cannot be used",
		"a real NVIDIA driver is present, so the stand-in libcuda.so.1 is refused"},
	{EngineUntrusted, Failed, "an installed engine was changed after it was installed",
		"xla_cuda_plugin.so was changed after it was installed"},
	{EngineExposed, Failed, "others than the user and root can change an engine's files",
		"/srv/deepwell/engines can be written by others"},

	{RuntimeFailed, Failed, "the engine reported an error while running",
		"execution failed on device 2"},
	{BufferGone, Failed, "a buffer was used after it was freed or donated",
		"argument 0 was donated to an earlier run"},
	{BufferMismatch, Failed, "a buffer's shape or element type is not the one that is needed",
		"argument 1 is f32[4,4]; the program takes f32[8,4]"},
	{ArgumentCount, Failed, "a run got the wrong number of arguments or devices",
		"the program takes 3 arguments; device 0 got 2"},
	{DeviceMismatch, Failed, "a buffer is on another device, or of another client",
		"argument 0 for device 1 is on device 5"},
	{NotSupported, Failed, "the engine has no such function",
		"this plugin (PJRT 0.81) has no PJRT_Buffer_Bitcast"},
	{OutOfMemory, NoFit, "a device or the host ran out of memory",
		"device 0 cannot hold 4.0 GiB more"},
	{HandlerFailed, Failed, "a Go function called by a program failed",
		"handler deepwell.scale: two buffers wanted, 1 given"},

	{CompileFailed, Failed, "the compiler refused the program",
		"the program does not compile for b200"},
	{ProgramText, Usage, "the program's text is not well formed",
		"step.mlir:12:9: custom op 'stablehlo.ad' is unknown"},
	{CompileOption, Usage, "a compile option is unknown or has a value of the wrong form",
		`no compile option is called "xla_gpu_enable_triton_gem"`},
	{CacheFailed, Failed, "the compile cache cannot be used",
		"the compile cache is not writable"},
	{ProgramRead, Failed, "the compiler's optimized program cannot be read",
		"optimized program: instruction 17 names no computation"},
	{TooLarge, NoFit, "a compiled program needs more memory than a device has",
		"stage step needs 201.0 GiB, b200 has 178.4 GiB"},
	{EnvRefused, Usage, "a variable of the environment would change numbers behind the recipe's back",
		"the variable XLA_FLAGS is set, which changes what every program is compiled to"},
	{CompilerCrashed, Failed, "the compiler crashed in its own process; the command did not",
		"the compiler crashed (SIGSEGV) on stage step"},

	{ProgramFormat, Usage, "a program file cannot be read",
		"program.dw: no program.json inside"},
	{ProgramInvalid, Usage, "a program contradicts itself",
		"stage fwd: argument w splits 10 rows over 4 devices"},
	{ProgramVersion, Usage, "a program file has a version this binary does not know",
		"program.dw has version 9; this binary reads 1"},

	{CardUnknown, Usage, "no card of that name is in the catalogue",
		`no card is called "b2000"; did you mean "b200"?`},
	{ClusterSpec, Usage, "a cluster is not spelled NxCARD",
		`"b200x8" is not a cluster`},
	{ProbeFailed, Failed, "the machine cannot be examined",
		"NVML answered: driver not loaded"},
	{MachineVersion, Usage, "a machine file has a version this binary does not know",
		"machine.json has version 7; this binary reads 1"},
	{DoctorFailed, Failed, "a check of doctor failed",
		"2 of 9 checks failed"},

	{GraphInvalid, Usage, "a graph contradicts itself",
		"linear: x has embed=64, w has embed=128"},
	{GraphText, Usage, "the text of a graph is not well formed",
		"there is no operation \"lineer\""},

	{RecipeText, Usage, "a recipe is not TOML",
		"run.toml is not TOML: expected '=' after key"},
	{RecipeKey, Usage, "a recipe has a key that there is not, or lacks one that it needs",
		`there is no key "optimizer.lr"`},
	{RecipeValue, Usage, "a recipe's value has another type or range, or contradicts another one",
		"micro = 3 does not divide batch = 16"},
	{RecipeChanged, Usage, "a run goes on with a recipe that would make it another run",
		"optimizer.rate was 0.0003 when the run was saved, now it is 0.001"},
	{RunDiffers, Failed, "a run goes on with something that changes its last bits, or its validation",
		"the run will not end with the same bits as one that was never stopped: another plan"},
	{PeersDiffer, Usage, "the processes of a run do not train the same",
		"process 1 (10.0.0.2:9000) has another model and other programs than this process"},

	{ModelUnknown, Usage, "nothing is known by that name: no preset, no folder, no file",
		`"llama3.1-7b" is neither a preset nor a folder`},
	{ModelMissing, Failed, "a model, or a file of it, is not on this machine",
		"hf:Qwen/Qwen3-8B is not in the Hugging Face cache"},
	{WeightMismatch, Usage, "weights are not those of the model that the configuration describes",
		"model.norm.weight is f32[4096]; the configuration says [2048]"},
	{WeightType, Usage, "weights of that element type cannot be read or written",
		"model.layers.0.mlp.up_proj.weight is f8e4m3fn"},
	{WeightQuantized, Usage, "weights are quantized already, in a way that is not turned into another",
		"the weights are quantized already, by fp8"},
	{WeightNotFinite, Numerics, "a weight is infinite or NaN",
		"model.layers.3.mlp.up_proj.weight holds a number that is not finite"},
	{FolderForeign, Usage, "an output folder holds other work, whole or half-written",
		"the folder holds config.json, which is not of this work"},
	{WeightsIncomplete, Failed, "weights are missing in part, not fetched to the end, or of a form " +
		"that is not read",
		"1 of 4 shards are missing: model-00002-of-00004.safetensors"},

	{DataMissing, Usage, "there is no file at a source's path",
		"nothing matches corpus/**/*.txt"},
	{DataEmpty, Usage, "a source has no text, or too little for one row",
		"corpus has 412 tokens; a row of 1024 needs 1025"},
	{DataFormat, Usage, "a file of data is not of its format, or has no text where text belongs",
		`chats.jsonl:7 has neither "text" nor "messages"`},
	{DataTokenizer, Usage, "the tokenizer lacks a token that the data needs",
		`the tokenizer has no token "<|im_start|>"`},
	{DataCache, Failed, "a token cache cannot be written or read",
		"the token cache cannot be written: no space left on device"},
	{DataPosition, Usage, "a position in the data is not one of these sources",
		`the position names the source "books", which is not in this mixture`},

	{CheckpointMissing, Failed, "there is no checkpoint where one is wanted",
		"runs/a holds no checkpoint"},
	{CheckpointDamaged, Failed, "a checkpoint is incomplete or was changed after it was written",
		"part-00000.safetensors: tensor \"embed\" has another SHA-256 than when it was written"},
	{CheckpointVersion, Usage, "a checkpoint has a version this binary does not know",
		"step-00000120 has version 9; this binary reads 1"},
	{CheckpointBusy, Failed, "another process is writing checkpoints into the same folder",
		"process 4711 is writing checkpoints into runs/a"},
	{CheckpointWrite, Failed, "a checkpoint cannot be written",
		"step 120 needs 1.2 GiB, the disk has 310.0 MiB left"},
	{CheckpointTensor, Usage, "a checkpoint does not hold the tensor or slice that is asked for",
		"the checkpoint has \"embed\" as f32[512,64]; f32[1024,64] is wanted"},
	{CheckpointExists, Failed, "another checkpoint of that step is there and whole",
		"step 120 of another run is there already"},
	{CheckpointLink, Failed, "what has the name of a checkpoint is no folder, or a link to none",
		"step-00000120 is a link to /disk2/step-00000120, which is not there"},
	{RunBusy, Failed, "another process is training in the same folder",
		"process 4711 is training in runs/a"},

	{TrainingLost, Numerics, "so many steps in a row were rejected that the run is lost",
		"8 steps in a row were rejected; the last because the loss is not finite"},
	{HostMemory, NoFit, "a run needs more memory than its host, control group or ulimit leaves",
		"the run needs at least 137.2 GiB of memory, and 22.8 GiB are left"},
	{HostDisk, NoFit, "the run's folder cannot be written, or its disk has no room for checkpoints",
		"checkpoints need 4.1 MiB, and the disk has 3.0 MiB left"},
	{RunStalled, Stalled, "a step, save or another phase of a run takes many times longer than usual",
		"step of step 41 takes longer than 1m0s"},

	{PlanText, Usage, "a plan is not JSON",
		"the plan is not JSON: unexpected EOF"},
	{PlanKey, Usage, "a plan has a key that there is not, or one twice",
		`there is no key "fsdp.stage"`},
	{PlanValue, Usage, "a value of a plan has another type or range",
		`fsdp.gather is "layers", not one of layer, micro, step`},
	{PlanVersion, Usage, "a plan has a version this binary does not know",
		"the plan has version 9; this binary reads 1"},
	{PlanMisfit, Usage, "a plan does not fit the model or the cluster",
		"fsdp 4 × tp 4 make 16 devices; the cluster has 8"},
	{PlanLater, Usage, "a plan asks for what Deepwell cannot do yet",
		"the axis ep is not there yet"},
	{PlanNoFit, NoFit, "no plan of a model fits a cluster",
		"no plan fits 8xb200"},
	{PlanCensus, Failed, "a compiled program sends something else than its plan says",
		"all-gather in 1 group of 8: 57 tensors, 90 bytes; the graph has 56, 88"},
	{PlanRemat, NoFit, "the compiler computes on its own again what a plan keeps",
		"the compiler repeats 12 instructions of gradient to save memory"},

	{ScheduleUnknown, Usage, "there is no pipeline schedule of that name",
		`there is no schedule "1f1p"`},
	{ScheduleShape, Usage, "a pipeline schedule does not come in that shape",
		"interleaved needs microbatches in groups of 4, one for each rank, not 6"},
	{ScheduleInvalid, Usage, "a pipeline schedule contradicts itself",
		"B3.2 comes before F3.2"},
	{ScheduleText, Usage, "the text of a pipeline schedule is not well formed",
		`"G0.1" is no action`},
	{ScheduleCosts, Usage, "the costs of a pipeline's stages do not fit the schedule",
		"the cost of forward has 3 entries for 4 stages"},
	{LinkLost, Stalled, "the other end of a link between stages is gone or cannot be reached",
		"process 1 at b:7000 (pipeline rank 1) has gone away"},
	{LinkTag, Failed, "the other end of a link sends something else than is expected",
		`process 1 at b:7000 (pipeline rank 1) sends "7 F1.4/0"; "7 F1.3/0" is expected`},
	{LinkShape, Failed, "an array that another stage sends has another shape than is expected",
		"process 1 at b:7000 (pipeline rank 1) sends f32[4,8] in 2 pieces; f32[4,16] is expected"},
	{LinkVersion, Failed, "the other end of a link speaks another version or belongs to another run",
		"the other end speaks version 1 of the protocol; this binary speaks 2"},
	{LinkData, Failed, "what came over a link is damaged",
		"piece 1 from process 1 at b:7000 (pipeline rank 1) has another checksum than when it was sent"},
	{LinkStalled, Stalled, "the other end of a link makes no progress",
		"process 1 at b:7000 (pipeline rank 1) has said nothing for 8s"},
	{PipelineStage, Usage, "programs of a pipeline do not fit the schedule or each other",
		"stage 3 has no program for W3.0"},
	{LinkKey, Usage, "processes share no key, or one that others may read",
		"0.0.0.0:7000 is not on the loopback interface, and there is no key"},

	{PolicyText, Usage, "a policy of precision is not JSON",
		"the policy is not JSON: unexpected EOF"},
	{PolicyKey, Usage, "a policy of precision has a key that there is not, or lacks one",
		`there is no key "rules.1.formt"`},
	{PolicyValue, Usage, "a value of a policy of precision has another type or range",
		`rules.1.format is "mxfp9", not one of bf16, mxfp8, nvfp4`},
	{PolicyVersion, Usage, "a policy of precision has a version this binary does not know",
		"the policy has version 9; this binary reads 1"},
	{PolicyMisfit, Usage, "a policy of precision does not fit the model",
		`the model has no linear layer or part "gat"`},
	{ParityMissed, Numerics, "the loss of a precision is beyond its bound",
		"the loss in nvfp4 is 1.7 % worse than in bf16, and 1 % is the bound"},
	{ParityUnproven, Numerics, "runs do not show whether the loss of a precision is within its bound",
		"nvfp4 is not resolved: the bound lies between the limits"},
}

func (c Code) class() Class {
	for _, r := range catalogue {
		if r.code == c {
			return r.class
		}
	}
	return Failed
}

// Catalogue prints every code with its exit class, meaning and an example, as docs/errors.md.
func Catalogue() string {
	var b strings.Builder
	b.WriteString("# Error codes\n\n" +
		"Printed from `diag/codes.go`; `go test ./diag -update` writes it.\n\n")
	b.WriteString("| code | exit | meaning | example |\n|---|---|---|---|\n")
	for _, r := range catalogue {
		fmt.Fprintf(&b, "| %s | %d | %s | %s |\n", r.code, r.class, r.meaning, r.example)
	}
	return b.String()
}
