package deepwell_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/spmd"
)

// docs/parallel.md shows one small plan on its whole way. It is written from the code that it
// shows, by go test . -run Page -update.
func TestParallelPage(t *testing.T) {
	pagePlan, err := os.ReadFile("examples/first-run/plan.json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(pagePlan, "plan.json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("examples/first-run/config.json")
	if err != nil {
		t.Fatal(err)
	}
	c, err := model.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Check(c); err != nil {
		t.Fatal(err)
	}
	loss, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	stages, err := spmd.Stages(loss, p.Stages(c.Layers))
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(stages[0].Graph, p)
	if err != nil {
		t.Fatal(err)
	}
	s, err := schedule.New("1f1b", schedule.Shape{Ranks: 2, Micros: int(p.Microbatches)})
	if err != nil {
		t.Fatal(err)
	}
	line, err := s.Simulate(schedule.Even(1, 1, 1))
	if err != nil {
		t.Fatal(err)
	}
	second := dryrun.Stage{Forward: 1, Input: 1, Weight: 1}
	drawn, err := (&dryrun.Step{Schedule: s, Stages: []dryrun.Stage{second, second}}).Run(dryrun.WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "docs/parallel.svg", drawn.SVG())
	golden.Compare(t, "docs/parallel.md", []byte(parallelPage(pagePlan, sh.Graph, s, line)))
}

func parallelPage(pagePlan []byte, g *ir.Graph, s *schedule.Schedule, line *schedule.Timeline) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# One plan, end to end\n\n`go test . -run Page "+
		"-update` writes this page from the code that it shows.\n\nThe model of README's first run on eight devices: two "+
		"pipeline stages, each on two by two devices that shard\nparameters (fsdp) and heads, MLP and "+
		"vocabulary (tp, with sequence parallelism).\n\n## plan.json\n\n```json\n%s```\n\n",
		pagePlan)
	fmt.Fprintf(&b, "## The forward pass of the first stage, on one device\n\nEvery type gives a value's "+
		"layout along each axis of the mesh: sharded by a dimension, partial (`+`, a term of a sum), or\nreplicated. Every "+
		"collective is an operation; the gradient of this graph transposes them.\n\n"+
		"```\n%s```\n\n", g)
	fmt.Fprintf(&b, "## Its collectives\n\nCounted in the graph, loop bodies once per iteration; tests "+
		"check that the compiled programs have the same.\nCount and bytes are of one device and one "+
		"microbatch; bytes are the full (gathered or unreduced) tensors.\n\n| kind | axes | group | count | bytes |\n"+
		"|---|---|---|---|---|\n")
	for _, row := range spmd.CensusOf(g) {
		fmt.Fprintf(&b, "| %s | %s | %s | %d | %s |\n", row.Kind, strings.Join(row.Axes, ", "), row.Group,
			row.Count, event.Size(row.Bytes))
	}
	total := line.Makespan * int64(s.Ranks)
	idle := total
	for _, busy := range line.Busy {
		idle -= busy
	}
	fmt.Fprintf(&b, "\n## The schedule\n\n![1F1B over two stages](parallel.svg)\n\n```\n%s```\n\n"+
		"F1.3 is the forward pass of stage 1 for microbatch 3, B its backward pass. Zero-bubble schedules split B into I (dgrad)\n"+
		"and W (wgrad). In a tick a stage runs one F, I or W; B takes two. "+
		"%d of %d ticks are idle: (P-1)(F+I+W) per\nrank, with P ranks.\n\n## Run it\n\n"+
		"`deepwell train examples/first-run/run.toml --plan examples/first-run/plan.json` runs it on "+
		"eight CPU devices,\nand with `--peers` and `--self` on four devices in each of two processes, "+
		"which exchange activations over TCP. `deepwell\ncompile examples/first-run/plan.json --cluster 8xb200` compiles "+
		"every stage for B200 and prints the memory\nof each rank by purpose. No real GPU "+
		"has run it: tests run four other plans over eight devices on a software GPU, and\n`deepwell verify "+
		"--replay examples/first-run/plan.json --cluster 8xb200` runs the optimized HLO of its programs on CPU\n"+
		"devices ([what is run](verify.md#what-is-run-compiled-predicted-unproven)).\n", s,
		idle, total)
	return b.String()
}
