package ir_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

func layoutGraph(t *testing.T, l *irtest.Layout) *ir.Graph {
	t.Helper()
	g, err := l.Graph()
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Every layout gives the loss and the gradients of one device, with the collectives that a person
// who writes it by hand would use and no others.
func TestLayoutsAgreeWithOneDevice(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	whole := map[string]*eval.Array{}
	for name, typ := range irtest.Wholes() {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = r.NormFloat64()
		}
		whole[name] = a
	}
	one := layoutGraph(t, nil)
	alone := map[string][]*eval.Array{}
	for name, a := range whole {
		alone[name] = []*eval.Array{a}
	}
	wantLoss, want := value(t, one, alone), gradients(t, one, alone)
	for i := range irtest.Layouts {
		l := &irtest.Layouts[i]
		t.Run(l.Name, func(t *testing.T) {
			g := layoutGraph(t, l)
			inputs := map[string][]*eval.Array{}
			for _, v := range g.Inputs {
				inputs[v.Name] = irtest.Spread(whole[v.Name], v.Type)
			}
			gr, err := ir.Grad(g, ir.GradPlan{})
			if err != nil {
				t.Fatalf("%v\n%s", err, g)
			}
			kept, err := eval.Run(gr.Forward, inputs)
			if err != nil {
				t.Fatal(err)
			}
			for d := range irtest.LayoutDevices {
				if got := kept[0][d].Data[0]; math.Abs(got-wantLoss) > 1e-9*math.Abs(wantLoss) {
					t.Errorf("device %d has loss %v, want %v", d, got, wantLoss)
				}
			}
			for k, v := range gr.Forward.Results {
				inputs[v.Name] = kept[k]
			}
			seed := &eval.Array{Type: g.Results[0].Type, Data: []float64{1}}
			inputs[gr.Seeds[0]] = []*eval.Array{seed, seed}
			got, err := eval.Run(gr.Backward, inputs)
			if err != nil {
				t.Fatal(err)
			}
			for k, v := range gr.Wrt {
				for d, wantShard := range irtest.Spread(&eval.Array{Type: whole[v.Name].Type, Data: want[k].Data}, v.Type) {
					for j, w := range wantShard.Data {
						if math.Abs(got[k][d].Data[j]-w) > 1e-9*(1+math.Abs(w)) {
							t.Fatalf("device %d: d/d%s[%d] is %v, want %v\n%s", d, v.Name, j, got[k][d].Data[j], w, gr.Backward)
						}
					}
				}
			}
			if got := collectivesOf(gr.Backward); strings.Join(got, " ") != strings.Join(l.Backward, " ") {
				t.Errorf("the backward graph has %v, want %v\n%s", got, l.Backward, gr.Backward)
			}
		})
	}
}

func collectivesOf(g *ir.Graph) []string {
	var list []string
	for _, op := range g.Ops {
		switch op.Kind {
		case "all_reduce", "all_gather", "reduce_scatter", "shard_slice", "all_to_all":
			list = append(list, op.Kind)
		}
	}
	return list
}

// A reduction that is left out is an error, wherever it is left out.
func TestDroppedReductionIsRejected(t *testing.T) {
	for i := range irtest.Layouts[:2] {
		l := &irtest.Layouts[i]
		text := layoutGraph(t, l).String()
		var lines []string
		renamed := map[string]string{}
		for line := range strings.Lines(text) {
			name, rest, found := strings.Cut(strings.TrimSpace(line), " = ")
			if found && (strings.HasPrefix(rest, "all_reduce(") || strings.HasPrefix(rest, "reduce_scatter(")) {
				arg := rest[strings.Index(rest, "(")+1 : strings.Index(rest, ")")]
				renamed[name] = arg
				continue
			}
			for from, to := range renamed {
				line = strings.NewReplacer("("+from+",", "("+to+",", " "+from+")", " "+to+")", "("+from+")", "("+to+")").Replace(line)
			}
			lines = append(lines, line)
		}
		if len(renamed) == 0 {
			t.Fatalf("%s has no reduction to drop", l.Name)
		}
		broken := strings.Join(lines, "")
		if _, err := ir.Parse(broken); err == nil {
			t.Errorf("%s: a dropped reduction was taken:\n%s", l.Name, broken)
		}
	}
}

// The builder keeps the first error, with the line of the caller, and one check ends it.
func TestBuilderKeepsTheFirstError(t *testing.T) {
	b := ir.NewBuilder("bad", ir.Axis{Name: "tp", Size: 2})
	x := b.Input("x", ir.Data, irtest.F32(irtest.D("rows", 2), irtest.D("embed", 3)), "")
	w := b.Input("w", ir.Param, irtest.F32(irtest.D("embed", 4), irtest.D("mlp", 5)), "")
	y := b.Linear(x, w)              // the first error
	z := b.Softmax(b.Add(y, y), "n") // nothing more is said
	_, err := b.Graph(z)
	var e *diag.Error
	if !errors.As(err, &e) || e.Code != diag.GraphInvalid || !strings.Contains(e.What, "differ in embed") ||
		!strings.HasPrefix(e.Where, "mesh_test.go:") {
		t.Errorf("got %v", err)
	}
}

// An all-to-all takes shards of the dimension it names, and what it splits must divide.
func TestAllToAllThatCannotBe(t *testing.T) {
	for _, row := range []struct{ from, to, says string }{
		{"rows", "heads", ""},
		{"heads", "rows", "is placed \"rows\", not \"heads\""},
		{"rows", "rows", "cannot be sharded along"},
		{"rows", "odd", "cannot be sharded along"},
		{"rows", "none", "cannot be sharded along"},
	} {
		b := ir.NewBuilder("exchange", ir.Axis{Name: "cp", Size: 2})
		typ := irtest.F32(irtest.D("rows", 3), irtest.D("heads", 4), irtest.D("odd", 5))
		typ.Place = typ.Place.With("cp", "rows")
		x := b.Input("x", ir.Data, typ, "")
		_, err := b.Graph(b.AllToAll(x, "cp", row.from, row.to))
		if row.says == "" && err != nil || row.says != "" && (err == nil || !strings.Contains(err.Error(), row.says)) {
			t.Errorf("from %s to %s: %v", row.from, row.to, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for i := range irtest.Layouts {
		g, err := irtest.Layouts[i].Graph()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(g.String())
	}
	f.Add("graph g mesh(a=2) {\n  data %x : f32[n=4]{a: n}\n  %y = all_gather(%x) axis=\"a\" dim=\"n\" : f32[n=8]\n  return %y\n}\n")
	f.Add("graph g {\n return }")
	f.Add(hostText)
	f.Fuzz(func(t *testing.T, text string) {
		g, err := ir.Parse(text)
		if err != nil {
			return
		}
		again, err := ir.Parse(g.String())
		if err != nil || again.String() != g.String() {
			t.Fatalf("%v\n%s", err, g)
		}
	})
}
