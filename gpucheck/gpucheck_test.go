package gpucheck

import (
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/replay"
)

func b200(t *testing.T, n string) machine.Cluster {
	t.Helper()
	c, err := machine.ParseCluster(n + "xb200")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// replayed compiles a pair for a GPU that is not there and compares its replay with the reference.
func replayed(t *testing.T, r *replay.Runner, p replay.Pair) (*replay.Result, *replay.Module) {
	t.Helper()
	p.Cluster = b200(t, "1")
	_, format, code, err := r.Optimized(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	m, err := replay.Rewrite(format, code, replay.Options{Fill: replay.NaNs})
	if err != nil {
		t.Fatal(err)
	}
	results, err := r.Run(t.Context(), p, false, m)
	if err != nil {
		t.Fatal(err)
	}
	return results[0], m
}

// A GPU whose log-sum-exp has base 2 merges the two halves of the keys wrongly, which the check
// finds.
func TestMergedPairFindsAWrongBase(t *testing.T) {
	r := replay.NewRunner(replay.RunOptions{Cache: enginetest.Cache(), WithoutCuDNN: true, Seed: 1})
	defer r.Close()
	op := operation{name: "merged pair", bound: boundAttention, build: mergedPair(1)}
	p, err := op.pair("sm_100")
	if err != nil {
		t.Fatal(err)
	}
	op.build = mergedPair(math.Log2E)
	wrong, err := op.pair("sm_100")
	if err != nil {
		t.Fatal(err)
	}
	p.GPU = wrong.GPU
	result, _ := replayed(t, r, p)
	if len(result.Beyond(op.bound)) == 0 {
		t.Errorf("a log-sum-exp of base 2 is within %g:\n%s", op.bound.Limit, result)
	}
	t.Log(result.Summary())
}

// What a check runs on a GPU, compiled for one that is not there and replayed, agrees with its plain
// form: the two are the same mathematics if the libraries are read as the conventions say.
func TestOperationsReplay(t *testing.T) {
	r := replay.NewRunner(replay.RunOptions{Cache: enginetest.Cache(), WithoutCuDNN: true, Seed: 1})
	defer r.Close()
	calls := map[string]bool{}
	for _, op := range slices.Concat(gemms(), ownKernels(), attentions(), blockDots()) {
		t.Run(op.name, func(t *testing.T) {
			p, err := op.pair("sm_100")
			if err != nil {
				t.Fatal(err)
			}
			result, m := replayed(t, r, p)
			if far := result.Beyond(op.bound); len(far) > 0 {
				t.Errorf("beyond %g:\n%s", op.bound.Limit, result)
			}
			for _, name := range m.Conventions {
				calls[name] = true
			}
			t.Log(result.Summary())
		})
	}
	for _, c := range replay.Conventions() {
		if _, ok := tests[c.Name]; ok && !calls[c.Name] {
			t.Errorf("no operation needs the convention %s", c.Name)
		}
	}
}

// Every convention has its test, or is one that nothing can refute, and every test has checks.
func TestEveryConventionHasItsTest(t *testing.T) {
	var names []string
	for _, op := range slices.Concat(gemms(), ownKernels(), attentions(), blockDots()) {
		names = append(names, op.name)
	}
	for _, c := range replay.Conventions() {
		test, ok := tests[c.Name]
		if !ok && c.Name != "allocate-buffer" && c.Name != "transform-sums" {
			t.Errorf("%s has no test", c.Name)
		}
		for _, prefix := range test.checks {
			if !slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, prefix) }) {
				t.Errorf("%s: no check begins with %q", c.Name, prefix)
			}
		}
	}
}

// Verdicts follow from checks: what is beyond its bound refutes, what rests on something that was
// not confirmed says nothing, and what was skipped gives its reason.
func TestVerdicts(t *testing.T) {
	r := &Report{WithoutCuDNN: "x", Checks: []Check{
		{Name: "GEMM, bf16", Status: OK, Calls: []string{"__cublas$gemm"}},
		{Name: "mxfp8 GEMM, equal scales", Status: OK, Calls: []string{"__cudnn$blockScaledDot"}},
		{Name: "mxfp8 GEMM, own scales", Status: Beyond, Calls: []string{"__cudnn$blockScaledDot"}},
		{Name: "attention, no mask", Status: Failed, Note: "DW2109 gone"},
		{Name: "attention, causal", Status: OK},
		{Name: "log-sum-exp", Status: Skipped, Note: noCuDNN},
	}}
	r.conclude()
	got := map[string]string{}
	for _, c := range r.Conventions {
		got[c.Name] = c.Verdict + ": " + c.By
	}
	for name, want := range map[string]string{
		"gemm":            "confirmed: GEMM, bf16",
		"block-dot":       "confirmed: mxfp8 GEMM, equal scales",
		"scale-tiles":     "refuted: mxfp8 GEMM, own scales",
		"attention":       "not tested: attention, no mask: DW2109 gone",
		"attention-mask":  "not tested: attention is not tested",
		"log-sum-exp":     "not tested: attention-mask is not tested",
		"allocate-buffer": "not tested: any contents, or order, agree with it, so that no run can refute it",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	status := map[string]Status{}
	for _, c := range r.Calls {
		status[c.Target] = c.Status
	}
	if status["__cublas$gemm"] != OK || status["__cudnn$blockScaledDot"] != Beyond ||
		status["__cudnn$fmhaSoftmax"] != Skipped {
		t.Errorf("custom calls: %+v", r.Calls)
	}
	if n := len(r.Wrong()); n != 2 {
		t.Errorf("%d checks are wrong", n)
	}
}

// A crash that names what is not played is no verdict on a GPU; all others are.
func TestErrorsAreResults(t *testing.T) {
	crash := diag.New(diag.CompilerCrashed, "the compiler crashed (status 86)").
		Because("softgpu: not played: function cuFoo of driver")
	if s, note := statusOf(crash); s != Skipped || note != "not played: function cuFoo of driver" {
		t.Errorf("%s %q", s, note)
	}
	if s, note := statusOf(diag.New(diag.DeviceFailed, "x failed").Because("a\nb")); s != Failed ||
		note != "DW2109 x failed: a" {
		t.Errorf("%s %q", s, note)
	}
}

// A report has no folder and no name of a host.
func TestScrub(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	text := scrub("cannot open /home/me/.local/lib/libcudnn.so.9 on " + host + ": 3/4")
	if text != "cannot open libcudnn.so.9 on HOST: 3/4" {
		t.Error(text)
	}
}

// The programs of a step can be built and priced in each precision, on one GPU and on eight.
func TestSteps(t *testing.T) {
	for _, n := range []string{"1", "8"} {
		for _, row := range precisions {
			pairs, err := row.pairs(small, b200(t, n))
			if err != nil || len(pairs) < 2 {
				t.Errorf("%s on %s: %d programs, %v", row.name, n, len(pairs), err)
			}
			for _, s := range []size{small, large} {
				if seconds, err := row.predicted(s, b200(t, n)); err != nil || !(seconds > 0) {
					t.Errorf("%s on %s: %v s, %v", row.name, n, seconds, err)
				}
			}
			for _, p := range pairs {
				if b := stepBound(&p, row.format); b.Why == "" {
					t.Errorf("%s: %s has no bound", row.name, p.Kind)
				}
			}
		}
	}
	if dtype.Format("f32").Quantized() {
		t.Error("f32 is quantized")
	}
}

// docs/verify.md has a row for each bound.
func TestDocsHaveBounds(t *testing.T) {
	text, err := os.ReadFile("../docs/verify.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []replay.Bound{boundGEMM, boundTF32, boundAttention, boundAttentionGrad,
		boundBlocks, boundCodes, boundUpdate, boundStepF32} {
		if row := " | " + human.Small(b.Limit) + " | " + b.Why + " |\n"; !strings.Contains(string(text), row) {
			t.Errorf("docs/verify.md has no row %q", row)
		}
	}
}
