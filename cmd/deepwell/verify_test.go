package main

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// What people read: all changes of sizes, NaN by name, the array beyond its bound, and what only the
// full plan is made of.
func TestVerifyText(t *testing.T) {
	d := &deepwell.VerifyResult{Model: "m", Cluster: "16384xb200", Mesh: "fsdp 16384 zero 3",
		Precision: "bf16", Conventions: []string{"gemm", "workspace"},
		Seq: 1024, Batch: 2, Seed: 1, Verdict: deepwell.VerdictBeyond,
		Programs: []*replay.Outcome{
			{Program: "gradient", Twins: []string{"other"}, Worst: "g.q", Apart: math.MaxFloat64,
				Bound: 2e-3, Beyond: []replay.Difference{{Name: "g.q", Relative: math.Inf(1),
					Equal: 4084, Elements: 4096}, {Name: "g.k", Relative: 1}}, Arrays: 13, Exact: 2, Zeros: []string{"g.v"},
				Noise: []string{"g.bias"}},
			{Program: "adamw", Arrays: 4, Exact: 4},
		},
		Full: &deepwell.FullCompile{Programs: 2, Needs: 3 << 40, Capacity: 178 << 30,
			OnlyFull: map[step.Kind][]string{step.Gradient: {"opcode sort"}}}}
	d.Small.Cluster, d.Small.Mesh = "2xb200", "fsdp 2 zero 3"
	for range 20 {
		d.Small.Changes = append(d.Small.Changes, replay.Change{Name: "layers", From: 126, To: 2})
	}
	var out bytes.Buffer
	(&verifyText{w: &out}).end(d, false)
	for _, want := range []string{"m · 16,384 B200 · fsdp 16384 zero 3 · bf16\n",
		"step        seq 1024 · batch 2 · nothing recomputed\n",
		"replays     2 B200 · fsdp 2 zero 3 · 2 programs, seed 1\n", "made small  layers 126 → 2 · ",
		"gradient + 1 alike  NaN      2e-3   2 of 13",
		"  beyond    NaN  g.q: 12 of 4,096 elements differ\n  beyond    1.0  g.k:",
		"memory      needs 3.0 TiB of 178.0 GiB, does not fit;",
		"noise       zero but for rounding, compared with the size of other gradients: g.bias\n",
		"zeros       gradient gives zeros, which show nothing: g.v\n", "trusts      the conventions gemm, workspace\n",
		"            only in the full gradient: opcode sort\n",
		"verdict     g.q of gradient is beyond its bound\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
	for line := range strings.Lines(out.String()) {
		if len([]rune(line)) > 101 {
			t.Errorf("a line of %d columns: %s", len([]rune(line)), line)
		}
	}
}

// A verification that was stopped says so, and judges nothing that it did not see; its JSON has
// lists, not null. The head stands before the first row, and no row twice.
func TestVerifyStopped(t *testing.T) {
	d := &deepwell.VerifyResult{Model: "m", Cluster: "1xb200", Precision: "bf16",
		Verdict: deepwell.VerdictStopped, Conventions: []string{},
		Missing: []deepwell.Unreplayed{{Program: "gradient"}, {Program: "evaluate"}, {Program: "adamw"}}}
	var out bytes.Buffer
	text := &verifyText{w: &out}
	text.progress(d)
	if !strings.Contains(out.String(), "3 programs") || !strings.Contains(out.String(), "worst array") {
		t.Errorf("at first there is only\n%s", out.String())
	}
	d.Programs = []*replay.Outcome{{Program: "gradient", Worst: "g.q", Apart: 1e-7, Bound: 1e-5,
		Arrays: 2, Cached: true}}
	d.Missing = d.Missing[1:]
	text.progress(d)
	text.end(d, true)
	for _, want := range []string{"\ngradient  1e-7     1e-5   0 of 2      cached ",
		"\nfull plan   not compiled (--quick)\n",
		"\nverdict     stopped after 1 of 3 programs, no verdict\n"} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("%q is not once in\n%s", want, out.String())
		}
	}
}
