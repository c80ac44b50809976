package deepwell

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A result beyond its bound is an error of its own code and exit status, which names the array that
// is farthest beyond.
func TestVerifyJudges(t *testing.T) {
	good := &replay.Outcome{Program: "evaluate", Worst: "loss", Apart: 1e-7, Bound: 1e-5,
		Conventions: []string{"gemm"}}
	far := &replay.Outcome{Program: "gradient", Worst: "g.block.q", Apart: 1.2e-2, Bound: 2e-3,
		Beyond: []string{"g.block.q"}, Conventions: []string{"attention", "gemm"}}
	bits := &replay.Outcome{Program: "adamw", Worst: "m.embed", Beyond: []string{"m.embed"}}
	for _, row := range []struct {
		programs []*replay.Outcome
		words    string // "" is no error
	}{
		{[]*replay.Outcome{good}, ""},
		{[]*replay.Outcome{good, far}, "1 of 2 programs differ from their references: g.block.q of " +
			"gradient by 1.2e-02, and 2e-03 is the bound"},
		{[]*replay.Outcome{far, bits, good}, "2 of 3 programs differ from their references: m.embed of adamw"},
	} {
		r := &verifier{job: VerifyJob{Source: "plan.json"}, done: &VerifyResult{Programs: row.programs}}
		err := r.judge()
		if row.words == "" {
			if err != nil || strings.Join(r.done.Conventions, " ") != "gemm" {
				t.Errorf("%v, conventions %q", err, r.done.Conventions)
			}
			continue
		}
		if e := diag.From(err); err == nil || e.Code != diag.ReplayBeyond || e.Class() != diag.Numerics ||
			!strings.HasPrefix(e.What, row.words) {
			t.Errorf("%v, not %q", err, row.words)
		}
	}
}

// What only one side is made of is listed by the kind of program, whatever its stage.
func TestFullCompileDiffers(t *testing.T) {
	f := &FullCompile{OnlyFull: map[step.Kind][]string{}, OnlySmall: map[step.Kind][]string{}}
	f.compare(map[step.Kind]replay.Census{step.Forward: {"fusion kLoop", "opcode sort"},
		step.Update: {"opcode add"}},
		[]*replay.Outcome{{Kind: step.Forward, Census: replay.Census{"fusion kLoop"}},
			{Kind: step.Forward, Census: replay.Census{"opcode while"}},
			{Kind: step.Update, Census: replay.Census{"opcode add"}}})
	if len(f.OnlyFull) != 1 || len(f.OnlySmall) != 1 || f.OnlyFull[step.Forward][0] != "opcode sort" ||
		f.OnlySmall[step.Forward][0] != "opcode while" {
		t.Errorf("%v, %v", f.OnlyFull, f.OnlySmall)
	}
}
