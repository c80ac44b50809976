package eval_test

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

const (
	rows, embed, mlp = 4, 6, 8
	devices          = 2
)

// place gives a type that some axes of the mesh cut; the sizes become those of one device.
func place(t ir.Type, axis, dimName string) ir.Type {
	out := ir.Type{Elem: t.Elem, Place: t.Place.With(axis, dimName)}
	for _, d := range t.Dims {
		if d.Name == dimName {
			d.Size /= devices
		}
		out.Dims = append(out.Dims, d)
	}
	return out
}

// A layout is one way to run the same two linears on two devices.
type layout struct {
	name     string
	axis     string
	x, w     [2]string // how the input and the two weights are cut: x[0], w[0], w[1]
	forward  func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value
	expected []string // collectives of the backward graph, in order
}

var layouts = []layout{
	{"tensor parallel", "tp", [2]string{""}, [2]string{"mlp", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			return b.AllReduce(b.Linear(b.Silu(b.Linear(x, w1)), w2), "tp")
		}, []string{"all_reduce"}},
	{"sequence parallel", "tp", [2]string{"rows"}, [2]string{"mlp", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			h := b.Linear(b.Silu(b.Linear(b.AllGather(x, "tp", "rows"), w1)), w2)
			return b.ReduceScatter(h, "tp", "rows")
		}, []string{"all_gather", "reduce_scatter"}},
	{"fsdp", "fsdp", [2]string{"rows"}, [2]string{"embed", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			h := b.Silu(b.Linear(x, b.AllGather(w1, "fsdp", "embed")))
			return b.Linear(h, b.AllGather(w2, "fsdp", "mlp"))
		}, []string{"reduce_scatter", "reduce_scatter"}},
	{"data parallel", "dp", [2]string{"rows"}, [2]string{"", ""},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value { return b.Linear(b.Silu(b.Linear(x, w1)), w2) },
		[]string{"all_reduce", "all_reduce"}},
}

func xType() ir.Type  { return irtest.F32(irtest.D("rows", rows), irtest.D("embed", embed)) }
func w1Type() ir.Type { return irtest.F32(irtest.D("embed", embed), irtest.D("mlp", mlp)) }
func w2Type() ir.Type { return irtest.F32(irtest.D("mlp", mlp), irtest.D("embed", embed)) }

// graph builds the layout's graph, or that of one device if there is no layout.
func (l *layout) graph(t *testing.T) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("mlp")
	tx, t1, t2 := xType(), w1Type(), w2Type()
	if l != nil {
		b = ir.NewBuilder("mlp", ir.Axis{Name: l.axis, Size: devices})
		if l.x[0] != "" {
			tx = place(tx, l.axis, l.x[0])
		}
		if l.w[0] != "" {
			t1, t2 = place(t1, l.axis, l.w[0]), place(t2, l.axis, l.w[1])
		}
	}
	x := b.Input("x", ir.Param, tx, "")
	w1, w2 := b.Input("w1", ir.Param, t1, ""), b.Input("w2", ir.Param, t2, "")
	var y *ir.Value
	if l != nil {
		y = l.forward(b, x, w1, w2)
	} else {
		y = b.Linear(b.Silu(b.Linear(x, w1)), w2)
	}
	loss := b.Sum(b.Mul(y, y), "rows", "embed")
	if l != nil && len(y.Type.Place) > 0 {
		loss = b.AllReduce(loss, l.axis)
	}
	g, err := b.Graph(loss)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return g
}

// spreadOut cuts a whole array into the pieces of the devices.
func spreadOut(whole *eval.Array, t ir.Type) []*eval.Array {
	pieces := make([]*eval.Array, devices)
	for d := range pieces {
		pieces[d] = eval.New(t)
		at := make([]int64, len(t.Dims))
		for i := range pieces[d].Data {
			n := int64(0)
			for k, dm := range whole.Type.Dims {
				from := at[k]
				if t.Dims[k].Size != dm.Size {
					from += int64(d) * t.Dims[k].Size
				}
				n = n*dm.Size + from
			}
			pieces[d].Data[i] = whole.Data[n]
			for k := len(at) - 1; k >= 0; k-- {
				if at[k]++; at[k] < t.Dims[k].Size {
					break
				}
				at[k] = 0
			}
		}
	}
	return pieces
}

// Every layout gives the loss and the gradients of one device, with the collectives that a person
// who writes it by hand would use and no others.
func TestLayoutsAgreeWithOneDevice(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	whole := map[string]*eval.Array{}
	for name, typ := range map[string]ir.Type{"x": xType(), "w1": w1Type(), "w2": w2Type()} {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = r.NormFloat64()
		}
		whole[name] = a
	}
	one := (*layout)(nil).graph(t)
	alone := map[string][]*eval.Array{}
	for name, a := range whole {
		alone[name] = []*eval.Array{a}
	}
	wantLoss, want := value(t, one, alone), gradients(t, one, alone)
	for i := range layouts {
		l := &layouts[i]
		t.Run(l.name, func(t *testing.T) {
			g := l.graph(t)
			inputs := map[string][]*eval.Array{}
			for _, v := range g.Inputs {
				inputs[v.Name] = spreadOut(whole[v.Name], v.Type)
			}
			gr, err := ir.Grad(g, ir.GradPlan{})
			if err != nil {
				t.Fatalf("%v\n%s", err, g)
			}
			kept, err := eval.Run(gr.Forward, inputs)
			if err != nil {
				t.Fatal(err)
			}
			for d := range devices {
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
				for d, wantPiece := range spreadOut(&eval.Array{Type: whole[v.Name].Type, Data: want[k].Data}, v.Type) {
					for j, w := range wantPiece.Data {
						if math.Abs(got[k][d].Data[j]-w) > 1e-9*(1+math.Abs(w)) {
							t.Fatalf("device %d: d/d%s[%d] is %v, want %v\n%s", d, v.Name, j, got[k][d].Data[j], w, gr.Backward)
						}
					}
				}
			}
			if got := collectivesOf(gr.Backward); strings.Join(got, " ") != strings.Join(l.expected, " ") {
				t.Errorf("the backward graph has %v, want %v\n%s", got, l.expected, gr.Backward)
			}
		})
	}
}

func collectivesOf(g *ir.Graph) []string {
	var list []string
	for _, op := range g.Ops {
		switch op.Kind {
		case "all_reduce", "all_gather", "reduce_scatter", "own_piece":
			list = append(list, op.Kind)
		}
	}
	return list
}

// A reduction that is left out is an error, wherever it is left out.
func TestDroppedReductionIsRejected(t *testing.T) {
	for _, l := range layouts[:2] {
		text := l.graph(t).String()
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
			t.Fatalf("%s has no reduction to drop", l.name)
		}
		broken := strings.Join(lines, "")
		if _, err := ir.Parse(broken); err == nil {
			t.Errorf("%s: a dropped reduction was taken:\n%s", l.name, broken)
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

func FuzzParse(f *testing.F) {
	for i := range layouts {
		f.Add(layouts[i].graph(&testing.T{}).String())
	}
	f.Add("graph g mesh(a=2) {\n  data %x : f32[n=4]{a: n}\n  %y = all_gather(%x) axis=\"a\" dim=\"n\" : f32[n=8]\n  return %y\n}\n")
	f.Add("graph g {\n return }")
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
