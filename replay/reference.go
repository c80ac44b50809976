package replay

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// referenceArch is a GPU architecture without special kernels: attention and block-scaled GEMMs are
// written out in StableHLO, which the CPU engine compiles as it is. Everything else is as on
// Blackwell: arguments, results, loops, types and collectives.
const referenceArch = "sm_80"

// A Pair is one program of a training step, written for a GPU and as its reference.
type Pair struct {
	Kind      step.Kind
	Cluster   machine.Cluster // that GPU is compiled for
	GPU       *program.Module
	Reference *program.Module // with the same arguments and results
	// Before are the references of programs whose results are arguments of this one, in the order in
	// which they run: a quantized copy is made by the quantize program, and what a backward pass
	// takes by the forward pass.
	Before []Producer
	Format dtype.Format // of GEMMs; of layers with different formats, the one of the fewest bits
	Vocab  int64        // tokens are drawn from it
	// Order is the place in the sequence of each token as devices have them ([spmd.Order]); nil is as
	// they are.
	Order []int64
}

// A Producer is a program that makes inputs of another.
type Producer struct {
	Kind   step.Kind
	Module *program.Module
}

// Pairs builds the programs of a step for the GPUs of the spec's plan, and their references.
func Pairs(s step.Spec) ([]Pair, error) {
	if s.Plan == nil {
		return nil, diag.New(diag.BadInput, "a replay needs a plan, which names the cluster")
	}
	cluster, err := machine.ParseCluster(s.Plan.Cluster)
	if err != nil {
		return nil, err
	}
	s.Arch = cluster.GPU.Arch
	gpu, err := step.Build(s)
	if err != nil {
		return nil, err
	}
	s.Arch = referenceArch
	if gpu.Shape.Documents == 0 { // masked nowhere, then
		s.Documents = -1
	}
	how := *s.Plan
	how.Offload = nil // the CPU has one memory
	how.Documents = 0
	s.Plan = &how
	ref, err := step.Build(s)
	if err != nil {
		return nil, err
	}
	if len(gpu.List) != len(ref.List) {
		return nil, diag.New(diag.ProgramInvalid, "%d programs for the GPU, %d references", len(gpu.List),
			len(ref.List))
	}
	var order []int64
	if s.Plan.CP.Balance {
		order = spmd.Order(s.Plan)
	}
	var list []Pair
	for i, one := range gpu.List {
		p := Pair{Kind: one.Kind, Cluster: cluster, GPU: one.Module, Reference: ref.List[i].Module,
			Format: gpu.Policy.Narrowest(), Vocab: s.Model.Facts().Vocab, Order: order}
		if err := p.check(); err != nil {
			return nil, err
		}
		for _, before := range producers(ref, ref.List[i]) {
			p.Before = append(p.Before, Producer{before.Kind, before.Module})
		}
		list = append(list, p)
	}
	return list, nil
}

// check compares the arguments and results of the two programs.
func (p *Pair) check() error {
	same := func(a, b program.Array) bool {
		return a.Name == b.Name && a.Role == b.Role && a.Into == b.Into && a.Global.Equal(b.Global) &&
			slices.EqualFunc(a.Split, b.Split, slices.Equal[[]string])
	}
	if !slices.EqualFunc(p.GPU.Args, p.Reference.Args, same) ||
		!slices.EqualFunc(p.GPU.Results, p.Reference.Results, same) {
		return diag.New(diag.ProgramInvalid, "the reference of %s has other arguments or results",
			p.GPU.Name)
	}
	return nil
}

// producers are the programs of the same rank, and of the same stage if they belong to one, that
// make arguments of p, each after those that it needs itself.
func producers(all *step.Programs, p *step.Program) (list []*step.Program) {
	makes := func(one *step.Program) bool {
		return slices.ContainsFunc(p.Module.Args, func(a program.Array) bool {
			return slices.ContainsFunc(one.Module.Results, func(r program.Array) bool {
				return a.Name == r.Name && a.Role == r.Role
			})
		})
	}
	for _, kind := range []step.Kind{step.Quantize, step.Forward, step.Input} {
		if kind == p.Kind {
			break // the others come after it
		}
		for _, one := range all.OfRank(p.Rank) {
			if one.Kind == kind && (one.Stage < 0 || one.Stage == p.Stage) && makes(one) {
				list = append(list, one)
			}
		}
	}
	return list
}

// wideArrays holds bf16 arrays as f32. Memory kinds are dropped: a replay has one memory.
func wideArrays(list []program.Array, wide bool) []program.Array {
	return lists.Map(list, func(a program.Array) program.Array {
		if a.Memory = ""; wide && a.Global.Type == dtype.BF16 {
			a.Global.Type = dtype.F32
		}
		return a
	})
}

// cpuFlags compile references and replays: every rounding as the program prescribes it, and fast,
// since each runs once.
var cpuFlags = map[string]any{"xla_allow_excess_precision": false,
	"xla_backend_optimization_level": 0}

// described is a module as the CPU engine runs it.
func described(m *program.Module, wide bool) *program.Module {
	out := *m
	out.Args, out.Results = wideArrays(m.Args, wide), wideArrays(m.Results, wide)
	out.Flags = cpuFlags
	if wide {
		out.Text = wideText(m.Text)
	}
	return &out
}

// Lines of StableHLO that read the bits of a bf16 number, make one of bits, or name its infinity.
var (
	toBits = regexp.MustCompile(`(?m)^(\s*)%(\S+) = stablehlo.bitcast_convert (%\S+) : ` +
		`\(tensor<(\S*?)bf16>\) -> (tensor<\S*?ui\d+>)`)
	fromBits = regexp.MustCompile(`(?m)^(\s*)%(\S+) = stablehlo.bitcast_convert (%\S+) : ` +
		`\((tensor<\S*?ui\d+>)\) -> tensor<(\S*?)bf16>`)
	lowest = regexp.MustCompile(`dense<0xFF80> : tensor<(\S*?)bf16>`)
	// Constants of bf16: one decimal number for all elements, or a list.
	constants = regexp.MustCompile(`dense<[^>x]*> : tensor<\S*?bf16>`)
	decimal   = regexp.MustCompile(`-?\d+(\.\d+)?(e[+-]?\d+)?`)
)

// wideText computes in f32 what a StableHLO module computes in bf16, but for bits that are read:
// there, numbers are rounded to bf16 first. Constants are rounded, too: XLA holds them in bf16
// before the replay sees them, and GELU's 0.044715 is 8e-4 off there. Both programs of a pair are
// treated so, hence they differ by f32 rounding only, and not by where XLA rounds to bf16.
func wideText(text string) string {
	const kept = "BF_16" // a bf16 that stays one
	text = toBits.ReplaceAllString(text, "${1}%w_${2} = stablehlo.convert ${3} : "+
		"(tensor<${4}f32>) -> tensor<${4}"+kept+">\n${1}%${2} = stablehlo.bitcast_convert "+
		"%w_${2} : (tensor<${4}"+kept+
		">) -> ${5}")
	text = fromBits.ReplaceAllString(text, "${1}%w_${2} = stablehlo.bitcast_convert ${3} : (${4}) -> "+
		"tensor<${5}"+kept+">\n${1}%${2} = stablehlo.convert %w_${2} : (tensor<${5}"+kept+
		">) -> tensor<${5}f32>")
	text = lowest.ReplaceAllString(text, "dense<0xFF800000> : tensor<${1}f32>")
	text = constants.ReplaceAllStringFunc(text, func(one string) string {
		numbers, of, _ := strings.Cut(one, "> : ")
		return decimal.ReplaceAllStringFunc(numbers, roundedDigits) + "> : " + of
	})
	text = strings.ReplaceAll(text, "bf16", "f32")
	return strings.ReplaceAll(text, kept, "bf16")
}

// roundedDigits is the bf16 number that is nearest to a decimal one, with all its digits.
func roundedDigits(digits string) string {
	v, err := strconv.ParseFloat(digits, 32)
	if err != nil { // beyond f32; the compiler refuses it as it is
		return digits
	}
	return fmt.Sprintf("%.17e", dtype.F32FromBF16(dtype.BF16FromF32(float32(v))))
}
