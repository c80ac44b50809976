package dryrun

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

var pages = flag.String("pages", "", "a folder to write the pages of the tests to, to be looked at")

// sample is a pipeline of a real size with uneven ends.
func sample(t testing.TB, name string, shape schedule.Shape) *Report {
	s := made(t, name, shape)
	step := even(s, Stage{Forward: 8e-3, Input: 9e-3, Weight: 7.5e-3, Send: 3e-4,
		Load: schedule.Steady(20<<30/int64(s.Ranks*s.Virtual), 6<<30)})
	step.Ranks = slices.Repeat([]program.Memory{{Params: 10 << 30, Optimizer: 30 << 30, Grads: 10 << 30,
		Temp: 5 << 30}}, s.Ranks)
	step.Stages[0].Forward *= 1.1
	step.Stages[len(step.Stages)-1].Forward *= 1.3
	for kind := range step.Stages[len(step.Stages)-1].Temp {
		step.Stages[len(step.Stages)-1].Temp[kind] *= 3
	}
	step.Reduce, step.Update, step.Host, step.Replicas = 0.02, 0.03, 0.004, 8
	line, err := step.Run(WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	r := &Report{Title: "llama3.1-70b <on> 64 GB200", Line: "fsdp 8 · pp 8 · 1f1b", Timeline: line,
		Low: 0.95 * line.Step, High: 1.07 * line.Step, Capacity: 184 << 30,
		Facts: []Fact{{"tokens a second and GPU", "4,040"}, {"1T tokens at $3.00 per GPU-hour", "45 days, $206k"}},
		Parts: []Part{{"linear layers", 0.6 * line.Step}, {"attention", 0.2 * line.Step}, {"norms and activations", 0.08 * line.Step},
			{"bubble", 0.07 * line.Step}, {"tensor parallel", 0}, {"gradients", 0.02 * line.Step}, {"optimizer", 0.03 * line.Step}},
		Plan: "{\n  \"version\": 1\n}", Notes: []string{"Figures are predictions; nothing was run."}}
	if r.Helps, err = step.Helps(); err != nil {
		t.Fatal(err)
	}
	if r.WhatIfs, err = step.Scenarios(func() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReport(t *testing.T) {
	elsewhere := regexp.MustCompile(`(?i)https?://|<script|<link|@import|url\(|src=`)
	for _, c := range []struct {
		file, name string
		shape      schedule.Shape
	}{
		{"small", "1f1b", schedule.Shape{Ranks: 8, Micros: 24}},
		{"one", "1f1b", schedule.Shape{Ranks: 1, Micros: 4}},
		{"virtual", "interleaved", schedule.Shape{Ranks: 4, Virtual: 4, Micros: 16}},
		{"vee", "zb-v", schedule.Shape{Ranks: 8, Micros: 20}},
		{"large", "zb-h1", schedule.Shape{Ranks: 64, Micros: 512}},
	} {
		t.Run(c.file, func(t *testing.T) {
			r := sample(t, c.name, c.shape)
			page := r.HTML()
			if !bytes.Equal(page, r.HTML()) {
				t.Error("two pages of one report differ")
			}
			if m := elsewhere.Find(page); m != nil {
				t.Errorf("the page asks for something: %s", m)
			}
			if bytes.Contains(page, []byte("<on>")) {
				t.Error("the title is not escaped")
			}
			if len(page) > 1_000_000 {
				t.Errorf("the page has %d bytes, more than 1 MB", len(page))
			}
			t.Logf("%d bytes", len(page))
			if *pages != "" {
				if err := os.WriteFile(filepath.Join(*pages, c.file+".html"), page, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// Pictures of schedules whose stages all cost a second stay as they are; go test -update draws them
// again.
func TestDrawings(t *testing.T) {
	for _, name := range []string{"1f1b", "zb-v"} {
		s := made(t, name, schedule.Shape{Ranks: 4, Micros: 8})
		line, err := even(s, Stage{Forward: 1, Input: 1, Weight: 1}).Run(WhatIf{})
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, filepath.Join("testdata", name+"-4x8.svg"), line.SVG())
	}
}

// Drawings stay well formed where the name is odd, nothing takes time, or there is very much.
func TestOddDrawings(t *testing.T) {
	own := *made(t, "gpipe", schedule.Shape{Ranks: 2, Micros: 2})
	own.Name = `<&">`
	for _, step := range []*Step{
		even(&own, Stage{Forward: 1, Input: 1, Weight: 1}),
		even(&own, Stage{}),
		even(&own, Stage{Forward: 599.999_999_999, Input: 3e-9, Weight: 1e-9}),
		even(made(t, "interleaved", schedule.Shape{Ranks: 8, Virtual: 4, Micros: 64}),
			Stage{Forward: 1, Input: 0.9, Weight: 1.1}),
	} {
		line, err := step.Run(WhatIf{})
		if err != nil {
			t.Fatal(err)
		}
		wellFormed(t, line.SVG())
	}
}

// wellFormed reads the drawing as XML and looks for its accessible name.
func wellFormed(t *testing.T, svg []byte) {
	t.Helper()
	titles := 0
	for dec := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "title" {
			titles++
		}
	}
	if titles == 0 || !bytes.Contains(svg, []byte(`role="img" aria-labelledby="title"`)) {
		t.Error("the drawing has no name for those who do not see it")
	}
	if bytes.Contains(svg, []byte("NaN")) || bytes.Contains(svg, []byte("Inf")) {
		t.Error("a length is NaN")
	}
}
