package diag

import (
	_ "embed" // for the catalogue
	"fmt"
	"strconv"
	"strings"
)

// A Code names one kind of failure for good: codes are never reused or renumbered.
type Code string

// Error makes a code a target of errors.Is: errors.Is(err, diag.LinkLost).
func (c Code) Error() string { return string(c) }

// The codes, by area: 10xx the command line, 20xx engines on disk, 21xx the engine at run time,
// 22xx compiling, 23xx programs, 24xx machines, 25xx graphs, 26xx recipes,
// 27xx models and their weights, 28xx data, 29xx checkpoints, 30xx training,
// 31xx plans, 32xx pipelines, 33xx precision.
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

	CompilerCrashed Code = "DW2207"
	EnvRefused      Code = "DW2208"

	ProgramFormat  Code = "DW2301"
	ProgramInvalid Code = "DW2302"
	ProgramVersion Code = "DW2303"

	GPUUnknown     Code = "DW2401"
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
	// WeightsIncomplete is for what looks like weights and cannot be read as such, which must never
	// be taken for no weights at all.
	WeightsIncomplete Code = "DW2708"

	DataMissing   Code = "DW2801"
	DataEmpty     Code = "DW2802"
	DataFormat    Code = "DW2803"
	DataTokenizer Code = "DW2804"
	DataCache     Code = "DW2805"
	DataPosition  Code = "DW2806"
	DataRead      Code = "DW2807"

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
		"Printed from `diag/codes.tsv`; `go test ./diag -update` writes it.\n\n" +
		"A code marked (warning) never ends a command. Others may come with a warning as well, where " +
		"a\ncommand can continue.\n\n")
	b.WriteString("| code | exit | meaning | example |\n|---|---|---|---|\n")
	for _, r := range catalogue {
		fmt.Fprintf(&b, "| %s | %d | %s | %s |\n", r.code, r.class, r.meaning, r.example)
	}
	return b.String()
}
