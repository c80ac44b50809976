package deepwell

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A result beyond its bound is an error of its own code and exit status, which names the array that
// is farthest beyond.
func TestVerifyJudges(t *testing.T) {
	good := &replay.Outcome{Program: "evaluate", Worst: "loss", Apart: 1e-7, Bound: 1e-5,
		Conventions: []string{"gemm"}}
	far := &replay.Outcome{Program: "gradient", Worst: "g.block.q", Apart: 1.2e-2, Bound: 2e-3,
		Beyond: []replay.Difference{{Name: "g.block.q"}}, Conventions: []string{"attention", "gemm"}}
	bits := &replay.Outcome{Program: "adamw", Worst: "m.embed", Beyond: []replay.Difference{{Name: "m.embed"}}}
	for _, row := range []struct {
		programs []*replay.Outcome
		words    string // "" is no error
	}{
		{[]*replay.Outcome{good}, ""},
		{[]*replay.Outcome{good, far}, "1 of 2 programs differ from their references: g.block.q of " +
			"gradient by 1.2e-2, and 2e-3 is the bound"},
		{[]*replay.Outcome{far, bits, good}, "2 of 3 programs differ from their references: m.embed of adamw"},
	} {
		r := &verifier{job: VerifyJob{Source: "plan.json"}, done: &VerifyResult{Verdict: VerdictStopped,
			Missing: make([]Unreplayed, len(row.programs))}}
		for i, o := range row.programs {
			if r.add(o); i < len(row.programs)-1 && r.done.Verdict == VerdictOK {
				t.Errorf("ok after %d of %d programs", i+1, len(row.programs))
			}
		}
		if want := map[bool]string{true: VerdictOK, false: VerdictBeyond}[row.words == ""]; r.done.Verdict !=
			want {
			t.Errorf("the verdict is %q, not %q", r.done.Verdict, want)
		}
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

// A model's usual sequence is no longer than its context, and a plan's that is longer than the
// learned positions is refused before anything is made small.
func TestVerifyKeepsToTheContext(t *testing.T) {
	for name, want := range map[string]int64{"gpt2": 1024, "llama3.1-8b": 2048} {
		p, err := planOf(VerifyJob{Source: name})
		if err != nil || p.Seq != want {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	r := &verifier{job: VerifyJob{Source: "gpt2"}, done: &VerifyResult{}}
	if err := r.read(); err != nil {
		t.Fatal(err)
	}
	r.plan.Seq = 4096
	if err := r.buildFull(); err == nil || !strings.Contains(err.Error(), "1024 learned positions") {
		t.Errorf("4096 tokens: %v", err)
	}
}

// The memory of the full plan is the sum over a step on the rank that needs most.
func TestVerifyAddsUpMemory(t *testing.T) {
	r := &verifier{job: VerifyJob{Source: "gpt2"}, done: &VerifyResult{}}
	if err := errors.Join(r.read(), r.buildFull()); err != nil {
		t.Fatal(err)
	}
	memory := map[string]engine.Memory{}
	for _, one := range r.full.List {
		memory[one.Module.Text] = engine.Memory{Temp: 1 << 40}
	}
	f := &FullCompile{}
	if err := f.addUp(r.full, memory, 100<<30); err != nil || f.Fits || f.Needs < 1<<40 {
		t.Errorf("%+v, %v", f, err)
	}
	if err := f.addUp(r.full, nil, 2<<40); err != nil || !f.Fits {
		t.Errorf("%+v, %v", f, err)
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
