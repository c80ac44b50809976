package plantest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

// A Row is one way to use some axes.
type Row struct {
	Name  string
	Axes  []string // that it uses
	Apply func(p *plan.Plan)
}

// Meshes are the ways to use one axis of a mesh with two devices.
func Meshes() []Row {
	fsdp := func(zero int, gather string) func(p *plan.Plan) {
		return func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: zero, Gather: gather} }
	}
	tp := func(a plan.TP) func(p *plan.Plan) { return func(p *plan.Plan) { p.TP = a } }
	cp := func(a plan.CP) func(p *plan.Plan) { return func(p *plan.Plan) { p.CP = a } }
	return []Row{
		{"dp", []string{"dp"}, func(p *plan.Plan) { p.DP = 2 }},
		{"zero1", []string{"fsdp"}, fsdp(1, "step")},
		{"zero2", []string{"fsdp"}, fsdp(2, "step")},
		{"zero3", []string{"fsdp"}, fsdp(3, "layer")},
		{"zero3micro", []string{"fsdp"}, fsdp(3, "microbatch")},
		{"tp", []string{"tp"}, tp(plan.TP{Size: 2})},
		{"sp", []string{"tp"}, tp(plan.TP{Size: 2, Sequence: true})},
		{"overlap", []string{"tp"}, tp(plan.TP{Size: 2, Sequence: true, Overlap: true})},
		{"cp", []string{"cp"}, cp(plan.CP{Size: 2, Kind: "gather"})},
		{"ring", []string{"cp"}, cp(plan.CP{Size: 2, Kind: "ring"})},
		{"balance", []string{"cp"}, cp(plan.CP{Size: 2, Kind: "gather", Balance: true})},
		{"a2a", []string{"cp"}, cp(plan.CP{Size: 2, Kind: "a2a"})},
	}
}

// Pipes are the ways to use two pipeline stages: every schedule.
func Pipes() (rows []Row) {
	for _, name := range schedule.Names() {
		rows = append(rows, Row{name, []string{"pp"}, func(p *plan.Plan) {
			p.PP = plan.PP{Size: 2, Schedule: name}
		}})
	}
	return rows
}

// Recomputations are a pipeline with every part of a model recomputed, alone and together, and
// a mesh without one.
func Recomputations() (rows []Row) {
	tags := []ir.Tag{ir.Embed, ir.Norm, ir.Attn, ir.MLP, ir.Head}
	for i := range len(tags) + 1 {
		list, name := tags, "all"
		if i < len(tags) {
			list, name = tags[i:i+1], string(tags[i])
		}
		rows = append(rows, Row{"zero3 1f1b, recompute " + name, []string{"fsdp", "pp"},
			func(p *plan.Plan) {
				p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
				p.PP = plan.PP{Size: 2, Schedule: "1f1b"}
				p.Recompute = list
			}})
	}
	return append(rows, Row{"zero3 sp cp, recompute all", []string{"fsdp", "tp", "cp"},
		func(p *plan.Plan) {
			p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
			p.TP, p.CP = plan.TP{Size: 2, Sequence: true}, plan.CP{Size: 2, Kind: "gather"}
			p.Recompute = tags
		}})
}

// Offloads are plans that keep activations, or what the optimizer keeps, on the host, or both: on
// one device, on meshes that compute with masters and with copies of them, with stages whose
// gradients are one program and two.
func Offloads() []Row {
	row := func(name string, axes []string, apply func(p *plan.Plan), what ...string) Row {
		return Row{name + ", offload " + strings.Join(what, " "), axes, func(p *plan.Plan) {
			apply(p)
			p.Offload = what
		}}
	}
	fsdp := func(zero int, gather, schedule string) func(p *plan.Plan) {
		return func(p *plan.Plan) {
			p.FSDP = plan.FSDP{Size: 2, Zero: zero, Gather: gather}
			if schedule != "" {
				p.PP = plan.PP{Size: 2, Schedule: schedule}
			}
		}
	}
	const acts, state = plan.Activations, plan.OptimizerState
	return []Row{
		row("one", nil, func(*plan.Plan) {}, acts, state),
		row("zero1", []string{"fsdp"}, fsdp(1, "step", ""), state),
		row("zero3", []string{"fsdp"}, fsdp(3, "layer", ""), acts),
		row("zero3 recompute", []string{"fsdp"}, func(p *plan.Plan) {
			fsdp(3, "layer", "")(p)
			p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
		}, acts, state),
		row("zero2 1f1b", []string{"fsdp", "pp"}, fsdp(2, "step", "1f1b"), acts, state),
		row("zero3 zb-h1", []string{"fsdp", "pp"}, fsdp(3, "layer", "zb-h1"), acts, state),
	}
}

// Combine gives all ways to use up to n axes at once, each axis once.
func Combine(n int, rows ...Row) []Row {
	var all []Row
	var add func(from, left int, to Row)
	add = func(from, left int, to Row) {
		for i := from; i < len(rows) && left > 0; i++ {
			m := rows[i]
			if slices.ContainsFunc(m.Axes, func(a string) bool { return slices.Contains(to.Axes, a) }) {
				continue
			}
			both := Row{Name: to.Name + " " + m.Name, Axes: slices.Concat(to.Axes, m.Axes),
				Apply: func(p *plan.Plan) { to.Apply(p); m.Apply(p) }}
			all = append(all, both)
			all[len(all)-1].Name = both.Name[1:]
			add(i+1, left-1, both)
		}
	}
	add(0, n, Row{Apply: func(*plan.Plan) {}})
	return all
}

// Larger are meshes of four devices along an axis, and those whose axes lie in another order.
func Larger() []Row {
	row := func(name string, apply func(p *plan.Plan)) Row { return Row{Name: name, Apply: apply} }
	return []Row{
		row("tp4", func(p *plan.Plan) { p.TP = plan.TP{Size: 4} }),
		row("sp4", func(p *plan.Plan) { p.TP = plan.TP{Size: 4, Sequence: true} }),
		row("zero3 4", func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 4, Zero: 3, Gather: "layer"} }),
		row("cp4", func(p *plan.Plan) { p.CP = plan.CP{Size: 4, Kind: "gather"} }),
		row("ring4", func(p *plan.Plan) { p.CP = plan.CP{Size: 4, Kind: "ring"} }),
		row("ring4 balance", func(p *plan.Plan) { p.CP = plan.CP{Size: 4, Kind: "ring", Balance: true} }),
		row("balance4", func(p *plan.Plan) { p.CP = plan.CP{Size: 4, Kind: "gather", Balance: true} }),
		row("a2a4", func(p *plan.Plan) { p.CP = plan.CP{Size: 4, Kind: "a2a"} }),
		row("a2a2 ring2", func(p *plan.Plan) {
			p.CP = plan.CP{Size: 4, Kind: "a2a+ring", Inner: 2, Balance: true}
		}),
		row("sp4 cp", func(p *plan.Plan) {
			p.TP, p.CP = plan.TP{Size: 4, Sequence: true}, plan.CP{Size: 2, Kind: "gather"}
		}),
		row("sp cp zero3, tp outside", func(p *plan.Plan) {
			p.TP, p.CP = plan.TP{Size: 2, Sequence: true}, plan.CP{Size: 2, Kind: "gather"}
			p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
			p.Order = []string{"pp", "tp", "cp", "ep", "fsdp", "dp"}
		}),
		row("zero3 tp4", func(p *plan.Plan) {
			p.TP, p.FSDP = plan.TP{Size: 4}, plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		}),
	}
}

// Contexts are every kind of context parallelism on 2, 4 and 8 devices, alone and with two devices
// or stages along another axis: with 8, they are for 16 devices and need 16 heads.
func Contexts() []Row {
	var rows []Row
	for size := int64(2); size <= 8; size *= 2 {
		for _, a := range []plan.CP{{Kind: "gather"}, {Kind: "gather", Balance: true},
			{Kind: "ring"}, {Kind: "ring", Balance: true}, {Kind: "a2a"},
			{Kind: "a2a+ring", Inner: size / 2, Balance: true}} {
			if a.Size = size; a.Inner == 1 {
				continue
			}
			name := fmt.Sprintf("%s%d", a.Kind, size)
			if a.Balance {
				name += " balance"
			}
			rows = append(rows, Row{name, []string{"cp"}, func(p *plan.Plan) { p.CP = a }})
		}
	}
	for _, r := range slices.Concat(Meshes(), Pipes()) {
		if r.Name == "zero3" || r.Name == "sp" || r.Name == "1f1b" {
			rows = append(rows, r)
		}
	}
	return slices.DeleteFunc(Combine(2, rows...), func(r Row) bool {
		return r.Axes[0] != "cp"
	})
}

// A Size is the size of the batches that plans are made for.
type Size struct{ Batch, Micros, Seq int64 }

// Plan makes the plan of a row.
func (r Row) Plan(s Size) *plan.Plan {
	p := plan.Default()
	p.Seq, p.Batch, p.Microbatches = s.Seq, s.Batch, s.Micros
	r.Apply(p)
	if p.TP.Overlap && p.MicrobatchSequences()/p.DataParallelSize() < 2 {
		p.TP.Overlap = false // nothing to halve
	}
	p.Cluster = fmt.Sprintf("%dxcpu", p.Devices())
	return p
}
