package diag

import (
	_ "embed" // for the catalogue
	"strconv"
	"strings"
)

// A Code names one kind of failure for good: codes are never reused or renumbered.
type Code string

// Error makes a code a target of errors.Is: errors.Is(err, diag.LinkLost). An error to return is
// made of it with [New].
func (c Code) Error() string { return string(c) }

// The codes, by area: 10xx the command line, 20xx engines on disk, 21xx the engine at run time,
// 22xx compiling, 23xx programs, 24xx machines, 25xx graphs, 26xx recipes,
// 27xx models and their weights, 28xx data, 29xx checkpoints, 30xx training, 31xx plans,
// 32xx pipelines, 33xx precision, 34xx replay. The comments are the meanings in codes.tsv;
// go test ./diag -update writes them.
const (
	// Internal: a bug in Deepwell.
	Internal Code = "DW1000"
	// BadUsage: the command line is not well formed.
	BadUsage Code = "DW1001"
	// BadInput: an input file, or an argument of a call, is not what it must be.
	BadInput Code = "DW1002"
	// FileError: a file cannot be read or written.
	FileError Code = "DW1003"
	// Canceled: the command or the call was stopped; exit status 130 or 143 if by a signal.
	Canceled Code = "DW1004"
	// NotPlain: a file that is to be written is a link, or not a plain file.
	NotPlain Code = "DW1005"

	// EngineUnknown: unknown engine name.
	EngineUnknown Code = "DW2001"
	// EngineMissing: an engine that the command needs is not installed.
	EngineMissing Code = "DW2002"
	// EngineDigest: a file's SHA-256 is not the pinned one.
	EngineDigest Code = "DW2003"
	// EngineArchive: a wheel is damaged or holds what it must not.
	EngineArchive Code = "DW2004"
	// EngineDownload: pip could not download a pinned package.
	EngineDownload Code = "DW2005"
	// EngineBusy: another process is installing the same engine.
	EngineBusy Code = "DW2006"
	// EngineAPI: a plugin speaks a PJRT version outside the supported range.
	EngineAPI Code = "DW2007"
	// EngineLoad: a plugin or a library it needs cannot be loaded.
	EngineLoad Code = "DW2008"
	// EngineHost: no engine is pinned for this operating system and processor.
	EngineHost Code = "DW2009"
	// EngineWrite: the engine's folder cannot be written.
	EngineWrite Code = "DW2010"
	// EngineCUDAStub: the stub of the CUDA driver cannot be used.
	EngineCUDAStub Code = "DW2011"
	// EngineUntrusted: an installed engine was changed after it was installed.
	EngineUntrusted Code = "DW2012"
	// EngineExposed: others than the user and root can change an engine's files.
	EngineExposed Code = "DW2013"
	// LibraryMissing: a library that a GPU needs to run programs cannot be loaded.
	LibraryMissing Code = "DW2014"

	// RuntimeFailed: the engine reported an error while running.
	RuntimeFailed Code = "DW2101"
	// BufferGone: a buffer was used after it was freed or donated.
	BufferGone Code = "DW2102"
	// BufferMismatch: a buffer has the wrong shape or element type.
	BufferMismatch Code = "DW2103"
	// ArgumentCount: a run got the wrong number of arguments or devices.
	ArgumentCount Code = "DW2104"
	// DeviceMismatch: a buffer is on another device, or of another client.
	DeviceMismatch Code = "DW2105"
	// NotSupported: Deepwell does not support something of a model, a captured program or a
	// module, or the engine has no such function.
	NotSupported Code = "DW2106"
	// OutOfMemory: a device or the host ran out of memory.
	OutOfMemory Code = "DW2107"
	// HandlerFailed: a Go function called by a program failed.
	HandlerFailed Code = "DW2108"
	// DeviceFailed: a GPU failed while running (a CUDA error, an Xid); the process cannot use it
	// again.
	DeviceFailed Code = "DW2109"
	// CollectiveFailed: NCCL reported an error.
	CollectiveFailed Code = "DW2110"
	// ReplicasDiffer: devices that must have the same bits of a parameter differ: one of them
	// computed wrongly, or its memory changed.
	ReplicasDiffer Code = "DW2111"
	// ExpertsOverflow: experts have more tokens in a step than the plan's largest slots.
	ExpertsOverflow Code = "DW2112"

	// CompileFailed: the compiler refused the program.
	CompileFailed Code = "DW2201"
	// ProgramText: the program's text is not well formed.
	ProgramText Code = "DW2202"
	// CompileOption: a compile option is unknown or has a value of the wrong form.
	CompileOption Code = "DW2203"
	// CacheFailed: (warning) the compile cache cannot be used.
	CacheFailed Code = "DW2204"
	// ProgramRead: the compiler's optimized program cannot be read.
	ProgramRead Code = "DW2205"
	// TooLarge: a compiled program needs more memory than a device has.
	TooLarge Code = "DW2206"

	// CompilerCrashed: the compiler crashed in its own process; the command did not.
	CompilerCrashed Code = "DW2207"
	// EnvRefused: an environment variable would change numerics.
	EnvRefused Code = "DW2208"

	// ProgramFormat: a program file cannot be read.
	ProgramFormat Code = "DW2301"
	// ProgramInvalid: a program contradicts itself.
	ProgramInvalid Code = "DW2302"
	// ProgramVersion: a program file has a version this binary does not know.
	ProgramVersion Code = "DW2303"

	// GPUUnknown: unknown GPU name.
	GPUUnknown Code = "DW2401"
	// ClusterSpec: a cluster is not spelled NxGPU.
	ClusterSpec Code = "DW2402"
	// ProbeFailed: the machine cannot be examined.
	ProbeFailed Code = "DW2403"
	// MachineVersion: a machine file has a version this binary does not know.
	MachineVersion Code = "DW2404"
	// DoctorFailed: a check of doctor failed.
	DoctorFailed Code = "DW2405"
	// GPUsMissing: the host lacks the GPUs that a run needs.
	GPUsMissing Code = "DW2406"
	// PreflightFailed: a GPU of the host is slow, wrong or not as a run expects it.
	PreflightFailed Code = "DW2407"
	// NVLinkOrder: the order of a run's processes does not follow the NVLink domains of their
	// GPUs.
	NVLinkOrder Code = "DW2408"

	// GraphInvalid: a graph contradicts itself.
	GraphInvalid Code = "DW2501"
	// GraphText: the text of a graph is not well formed.
	GraphText Code = "DW2502"

	// RecipeText: a recipe is not TOML.
	RecipeText Code = "DW2601"
	// RecipeKey: a recipe has an unknown or renamed key, or lacks a required one.
	RecipeKey Code = "DW2602"
	// RecipeValue: a recipe's value has the wrong type or range, or contradicts another one.
	RecipeValue Code = "DW2603"
	// RecipeChanged: a resumed run has a recipe that would make it another run.
	RecipeChanged Code = "DW2604"
	// RunDiffers: (warning) a resumed run has a change that affects its last bits, or its
	// validation.
	RunDiffers Code = "DW2605"
	// PeersDiffer: the processes of a run do not train the same thing.
	PeersDiffer Code = "DW2606"

	// ModelUnknown: unknown model: no preset, folder or file has that name.
	ModelUnknown Code = "DW2701"
	// ModelMissing: a model, or a file of it, is not on this machine.
	ModelMissing Code = "DW2702"
	// WeightMismatch: weights do not match the model's config.
	WeightMismatch Code = "DW2703"
	// WeightType: weights of that element type cannot be read or written.
	WeightType Code = "DW2704"

	// WeightQuantized: weights are already quantized, in a format that cannot be converted.
	WeightQuantized Code = "DW2705"
	// WeightNotFinite: a weight is infinite or NaN.
	WeightNotFinite Code = "DW2706"
	// FolderForeign: an output folder holds other files, complete or half-written.
	FolderForeign Code = "DW2707"
	// WeightsIncomplete: weights are incomplete, or in a format that cannot be read: never taken
	// for no weights.
	WeightsIncomplete Code = "DW2708"

	// DataMissing: there is no file at a source's path.
	DataMissing Code = "DW2801"
	// DataEmpty: a source has no text, or too little for one sequence.
	DataEmpty Code = "DW2802"
	// DataFormat: a file of data is not of its format, or has no text where text belongs.
	DataFormat Code = "DW2803"
	// DataTokenizer: the tokenizer lacks a token that the data needs.
	DataTokenizer Code = "DW2804"
	// DataCache: a token cache cannot be written or read.
	DataCache Code = "DW2805"
	// DataPosition: a position in the data is not one of these sources.
	DataPosition Code = "DW2806"
	// DataRead: a dataset failed to give a batch.
	DataRead Code = "DW2807"
	// DataEnd: the data of a run has ended; a run of a stream ends there, saved.
	DataEnd Code = "DW2808"
	// DataTemplate: a model's chat template cannot be read or run, or refuses a chat.
	DataTemplate Code = "DW2809"

	// CheckpointMissing: there is no checkpoint where one is wanted.
	CheckpointMissing Code = "DW2901"
	// CheckpointDamaged: a checkpoint is incomplete or was changed after it was written.
	CheckpointDamaged Code = "DW2902"
	// CheckpointVersion: a checkpoint has a version this binary does not know.
	CheckpointVersion Code = "DW2903"
	// CheckpointBusy: another process is writing checkpoints into the same folder.
	CheckpointBusy Code = "DW2904"
	// CheckpointWrite: a checkpoint cannot be written.
	CheckpointWrite Code = "DW2905"
	// CheckpointTensor: a checkpoint does not hold the tensor or slice that is asked for.
	CheckpointTensor Code = "DW2906"
	// CheckpointExists: a complete checkpoint of that step exists already.
	CheckpointExists Code = "DW2907"
	// CheckpointLink: a checkpoint's name is not a folder, or a broken link.
	CheckpointLink Code = "DW2908"
	// RunBusy: another process is training in the same folder.
	RunBusy Code = "DW2909"

	// TrainingLost: too many steps in a row were rejected.
	TrainingLost Code = "DW3001"
	// HostMemory: a run needs more memory than its host, control group or ulimit leaves.
	HostMemory Code = "DW3002"
	// HostDisk: the run's folder cannot be written, or its disk has no room for checkpoints.
	HostDisk Code = "DW3003"
	// RunStalled: a step, save or another phase of a run takes many times longer than usual.
	RunStalled Code = "DW3005"
	// TrainerClosed: a trainer is used after Close, or after a step was abandoned.
	TrainerClosed Code = "DW3006"

	// PlanText: a plan is not JSON.
	PlanText Code = "DW3101"
	// PlanKey: a plan has an unknown key, or one twice.
	PlanKey Code = "DW3102"
	// PlanValue: a value of a plan has the wrong type or range.
	PlanValue Code = "DW3103"
	// PlanVersion: a plan has a version this binary does not know.
	PlanVersion Code = "DW3104"
	// PlanMisfit: a plan does not fit the model or the cluster.
	PlanMisfit Code = "DW3105"
	// PlanLater: a plan asks for what Deepwell cannot do yet.
	PlanLater Code = "DW3106"
	// PlanNoFit: no plan of a model fits a cluster.
	PlanNoFit Code = "DW3107"
	// PlanCensus: the collectives of a compiled program do not match its plan.
	PlanCensus Code = "DW3108"
	// PlanRemat: the compiler rematerializes activations that the plan saves.
	PlanRemat Code = "DW3109"

	// ScheduleUnknown: unknown pipeline schedule.
	ScheduleUnknown Code = "DW3201"
	// ScheduleShape: a pipeline schedule does not support that shape.
	ScheduleShape Code = "DW3202"
	// ScheduleInvalid: a pipeline schedule contradicts itself.
	ScheduleInvalid Code = "DW3203"
	// ScheduleText: the text of a pipeline schedule is not well formed.
	ScheduleText Code = "DW3204"
	// ScheduleCosts: the costs of a pipeline's stages do not fit the schedule.
	ScheduleCosts Code = "DW3205"
	// LinkLost: the other end of a link between stages is gone or cannot be reached.
	LinkLost Code = "DW3206"
	// LinkTag: the other end of a link sends unexpected data.
	LinkTag Code = "DW3207"
	// LinkShape: an array from another stage has an unexpected shape.
	LinkShape Code = "DW3208"
	// LinkVersion: the other end of a link speaks another version or belongs to another run.
	LinkVersion Code = "DW3209"
	// LinkData: data received over a link is damaged.
	LinkData Code = "DW3210"
	// LinkStalled: the other end of a link makes no progress.
	LinkStalled Code = "DW3211"
	// PipelineStage: programs of a pipeline do not fit the schedule or each other.
	PipelineStage Code = "DW3212"
	// LinkKey: processes have no shared key, or one that others may read.
	LinkKey Code = "DW3213"
	// ProcessFailed: a process of a run on this host failed; the exit status is that process's.
	ProcessFailed Code = "DW3214"

	// PolicyText: a precision policy is not JSON.
	PolicyText Code = "DW3301"
	// PolicyKey: a precision policy has an unknown key, or lacks one.
	PolicyKey Code = "DW3302"
	// PolicyValue: a value of a precision policy has the wrong type or range.
	PolicyValue Code = "DW3303"
	// PolicyVersion: a precision policy has a version this binary does not know.
	PolicyVersion Code = "DW3304"
	// PolicyMisfit: a precision policy does not fit the model.
	PolicyMisfit Code = "DW3305"

	// ParityMissed: the loss of a precision is beyond its bound.
	ParityMissed Code = "DW3306"
	// ParityUnproven: runs do not show whether the loss of a precision is within its bound.
	ParityUnproven Code = "DW3307"

	// ReplayOpcode: a replay has no rule for an instruction of the optimized program.
	ReplayOpcode Code = "DW3401"
	// ReplayCall: a replay has no rule for a custom call, or for its epilogue, mask or operands.
	ReplayCall Code = "DW3402"
	// ReplayLayout: a replay does not know a layout or an element type.
	ReplayLayout Code = "DW3403"
	// ReplayGroups: a replay does not know how the devices of a collective are given.
	ReplayGroups Code = "DW3404"
	// ReplayConfig: a configuration that only the GPU's runtime reads contradicts the optimized
	// program.
	ReplayConfig Code = "DW3405"
	// ReplayBeyond: a replayed program's results differ from the reference by more than their
	// bound.
	ReplayBeyond Code = "DW3406"
	// GPUDiffers: what a GPU computes differs from CPU devices by more than its bound, or a check
	// failed.
	GPUDiffers Code = "DW3407"
)

// A row is one entry of the catalogue: what a code means, and one message that shows it.
type row struct {
	code    Code
	class   Class
	meaning string
	example string
}

//go:embed codes.tsv
var codesText string

// catalogue is the only table of codes, one to a line of codes.tsv; docs/errors.md is printed from
// it.
var catalogue = func() (rows []row) {
	for line := range strings.Lines(codesText) {
		cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if exit, err := strconv.Atoi(cells[1]); err == nil { // else it is the line of titles
			rows = append(rows, row{Code(cells[0]), Class(exit), cells[2], cells[3]})
		}
	}
	return rows
}()

func (c Code) class() Class {
	if r := c.row(); r != nil {
		return r.class
	}
	return Failed
}

// meaning is what the catalogue says of a code, or the code itself.
func (c Code) meaning() string {
	if r := c.row(); r != nil {
		return r.meaning
	}
	return string(c)
}

// row is the code's entry of the catalogue; nil for a code that it does not have.
func (c Code) row() *row {
	for i := range catalogue {
		if catalogue[i].code == c {
			return &catalogue[i]
		}
	}
	return nil
}
