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
		Programs: []*replay.Outcome{
			{Program: "gradient", Twins: []string{"other"}, Worst: "g.q", Apart: math.MaxFloat64,
				Bound: 2e-3, Beyond: []string{"g.q", "g.k"}, Arrays: 13, Exact: 2, Zeros: []string{"g.v"}},
			{Program: "adamw", Arrays: 4, Exact: 4},
		},
		Full: &deepwell.FullCompile{Programs: 2,
			OnlyFull: map[step.Kind][]string{step.Gradient: {"opcode sort"}}}}
	d.Small.Cluster, d.Small.Mesh = "2xb200", "fsdp 2 zero 3"
	for range 20 {
		d.Small.Changes = append(d.Small.Changes, replay.Change{Name: "layers", From: 126, To: 2})
	}
	var out bytes.Buffer
	if err := (&app{stdout: &out}).writeVerify(d); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"m · 16,384 B200 · fsdp 16384 zero 3 · bf16\n",
		"replayed    2 B200 · fsdp 2 zero 3\n", "made small  layers 126 → 2 · ",
		"gradient + 1 alike  NaN    2e-3   2 of 13", "g.q; 2 beyond the bound\n",
		"zeros       gradient gives zeros, which show nothing: g.v\n", "trusts      gemm, workspace\n",
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
