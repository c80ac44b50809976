package table

import (
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
)

const spec = "mxfp8 1x64x96 along across: bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4"

func reports() (with, without *overlap.Report) {
	attention := overlap.Kernel{Name: "c.1", OpName: "attn/attention/batch,seq,heads,head",
		Target: "__cudnn$fmhaSoftmax", Shape: "bf16[1,2,64,16]", Bytes: 400, FLOPs: 1e6, Bits: 16,
		Seconds: 3e-6}
	product := overlap.Kernel{Name: "c.2", OpName: "mlp/block_dot/batch,seq,mlp",
		Target: "__cudnn$blockScaledDot", Shape: "bf16[64,96]", Bytes: 700, FLOPs: 2 * 64 * 96 * 32,
		Bits: 8, Seconds: 2e-6}
	fused := overlap.Kernel{Name: "c.3", OpName: "mlp/quantize_once/batch,seq,mlp", Spec: spec,
		Target: "__gpu$xla.gpu.triton", Shape: "u8[64,96]", Bytes: 500, Seconds: 1e-6}
	stack := overlap.Kernel{Name: "loop_fusion.7.clone", Shape: "u8[4,64]", Bytes: 10, Seconds: 1e-8}
	plain := func(kind, dims string) overlap.Kernel {
		return overlap.Kernel{Name: kind + "_fusion", OpName: "mlp/" + kind + "/" + dims,
			Shape: "bf16[64,96]", Bytes: 400, Seconds: 1e-6}
	}
	loop := func(list ...overlap.Kernel) *overlap.Report {
		return &overlap.Report{Loops: []overlap.Loop{{Rounds: 9},
			{Rounds: 3, Kernels: append([]overlap.Kernel{attention, product, product, stack}, list...)}}}
	}
	return loop(fused), loop(plain("mul", "batch,seq,mlp"), plain("quantize_with", "mlp,batch,seq"))
}

// Rows have what is known of a kernel, and nothing is lost between rows, groups and layers.
func TestTable(t *testing.T) {
	choices := []kernels.Choice{{Kind: "quantize", Kernel: kernels.Triton, Why: "one read"},
		{Kind: "block_dot", Kernel: kernels.CuDNN, Why: "blocks"}}
	gpu, err := machine.FindGPUModel("b200")
	if err != nil {
		t.Fatal(err)
	}
	fusedProgram, plain := reports()
	layers, err := Of(fusedProgram, plain, choices, gpu)
	if err != nil || len(layers) != 1 || layers[0].Pass != "forward" || layers[0].Rounds != 3 {
		t.Fatalf("%+v, %v", layers, err)
	}
	var rows []Row
	var groups, unfused Cost
	for _, g := range layers[0].Groups {
		var sum Cost
		for _, r := range g.Rows {
			sum = Cost{sum.Count + r.Count, sum.Bytes + r.Bytes, sum.Seconds + r.Seconds}
			rows = append(rows, r)
		}
		if sum.Count != g.Total.Count || sum.Bytes != g.Total.Bytes {
			t.Errorf("rows of %s are %+v, not %+v", g.Dims, sum, g.Total)
		}
		groups.Bytes, unfused.Bytes = groups.Bytes+g.Total.Bytes, unfused.Bytes+g.Unfused.Bytes
		if g.Dims == "batch,mlp,seq" && (g.Total.Count != 3 || g.Unfused.Count != 4) {
			t.Errorf("the group of the kernel is %+v", g)
		}
	}
	if groups.Bytes != layers[0].Total.Bytes || unfused.Bytes != layers[0].Unfused.Bytes {
		t.Errorf("groups have %+v and %+v of %+v", groups, unfused, layers[0])
	}
	want := []Row{
		{Operation: "mlp GEMM", Shape: "64×96×32", Kernel: "blockScaledDot", Provider: cudnn, Why: "blocks",
			Cost: Cost{Count: 2}},
		{Operation: "mlp swiglu + quantize", Shape: "64×96", Kernel: "swiglu mxfp8", Provider: own,
			Why: "one read", Cost: Cost{Count: 1}},
	}
	for _, w := range want {
		found := false
		for _, r := range rows {
			found = found || r.Operation == w.Operation && r.Shape == w.Shape && r.Kernel == w.Kernel &&
				r.Provider == w.Provider && r.Why == w.Why && r.Count == w.Count && r.Roofline > 0
		}
		if !found {
			t.Errorf("no row %+v in %+v", w, rows)
		}
	}
	if m := (maker{gpu: gpu}); math.Abs(m.ideal(0, int64(gpu.Peak.MXFP8), 8)-1) > 1e-9 {
		t.Errorf("a second of MXFP8 is %g s", m.ideal(0, int64(gpu.Peak.MXFP8), 8))
	}
	if _, err := Of(fusedProgram, &overlap.Report{}, choices, gpu); diag.From(err).Code != diag.NotSupported {
		t.Errorf("a program without loops: %v", err)
	}
}

// What XLA fuses although a kernel of ours could compute it has the reason why that is not taken.
func TestReasonsAgainstKernels(t *testing.T) {
	m := maker{choices: []kernels.Choice{
		{Kind: "rms_norm", Kernel: kernels.Triton, Why: "once"},
		{Kind: "rms_norm", Kernel: kernels.Plain, Why: "too long"},
		{Kind: "rms_norm", Kernel: kernels.Plain, Why: "not bf16"},
		{Kind: "rms_norm", Kernel: kernels.Plain, Why: "too long"}}}
	for kind, want := range map[string]string{"rms_norm": "too long; or: not bf16",
		"mul": "XLA fuses what neither a library nor a kernel of ours has"} {
		n := stablehlo.Name{Kind: kind}
		if got := m.why(fusion, n, true, overlap.Kernel{}); got != want {
			t.Errorf("%s: %s", kind, got)
		}
	}
	if got := m.why(own, stablehlo.Name{Kind: "rms_norm"}, true, overlap.Kernel{}); got != "once" {
		t.Errorf("a kernel of our own: %s", got)
	}
}

// Names of operations are all that a named program has more, and every instruction has one that can
// be read, so that what is listed is what runs.
func TestNamesChangeNothing(t *testing.T) {
	loc := regexp.MustCompile(` loc\("[^"]*"\)`)
	for _, arch := range []string{"sm_100", "sm_80"} {
		g, err := irtest.Tiny(2)
		if err != nil {
			t.Fatal(err)
		}
		var texts [2]string
		for i := range texts {
			s := kernels.For(arch).With(kernels.Options{Named: i == 1})
			if texts[i], err = lower.StableHLO(g, lower.Options{Kernels: s}); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(loc.FindAllString(texts[1], -1)); n < 50 {
			t.Errorf("%s: %d instructions have names", arch, n)
		}
		if loc.ReplaceAllString(texts[1], "") != texts[0] {
			t.Errorf("%s: a program with names is another one", arch)
		}
		if strings.Contains(texts[0], "loc(") {
			t.Errorf("%s: a program without names has some", arch)
		}
	}
}
