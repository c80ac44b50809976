package train

import (
	"context"
	"encoding/binary"
	"math"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// An inputFeed gives devices their parts of what comes from the host.
type inputFeed struct {
	engine *engine.Engine
	mesh   []ir.Axis
	order  []int64              // of a row's tokens, where devices cut it; nil as it comes
	cut    map[string]*ir.Value // inputs of the loss, by name: which part is a device's
	drawn  func() []int32       // seed and step, for stochastic rounding
}

// newInputFeed makes that of the devices that run programs of stages, which take their data alike.
func newInputFeed(t *Trainer, p *plan.Plan, list []*step.Program) *inputFeed {
	f := &inputFeed{engine: t.opts.Engine, cut: map[string]*ir.Value{}}
	f.drawn = func() []int32 { return []int32{int32(t.opts.Recipe.Seed), int32(t.step)} }
	if p != nil {
		f.order = spmd.Order(p)
	}
	for _, one := range list {
		if f.mesh = one.Graph.Mesh; one.Stage < 0 {
			continue
		}
		for _, v := range one.Graph.Inputs {
			if v.Role == ir.Data && len(v.Type.Place) > 0 {
				f.cut[v.Name] = v
			}
		}
	}
	return f
}

// batch gives the inputs that some rows of a batch make; share weighs each label.
func (f *inputFeed) batch(b *data.Batch, first, rows int, share float64) map[string][]byte {
	from, to := first*b.Seq, (first+rows)*b.Seq
	return map[string][]byte{
		model.InputIDs:       f.rows(b.IDs[from:to], b.Seq),
		model.InputLabels:    f.rows(b.Labels[from:to], b.Seq),
		model.InputPositions: f.rows(b.Positions[from:to], b.Seq),
		model.InputSegments:  f.rows(b.Segments[from:to], b.Seq),
		model.InputShare:     number(share),
		ir.InputNoise:        whole(f.drawn()),
		ir.InputRows:         f.rows(count(int32(from), int32(to)), b.Seq),
	}
}

// count lists the tokens of a step from one to another.
func count(from, to int32) []int32 {
	list := make([]int32, to-from)
	for i := range list {
		list[i] = from + int32(i)
	}
	return list
}

// rows gives whole numbers in the order in which devices that cut the sequence take them.
func (f *inputFeed) rows(list []int32, seq int) []byte {
	if f.order == nil {
		return whole(list)
	}
	turned := make([]int32, len(list))
	for row := 0; row < len(list); row += seq {
		for i, from := range f.order {
			turned[row+i] = list[row+int(from)]
		}
	}
	return whole(turned)
}

// place puts an input on the devices of a stage: of what is cut each its part, of others all.
func (f *inputFeed) place(s *program.Module, spec program.Array, bytes []byte) (*engine.Array,
	error) {
	v := f.cut[spec.Name]
	return f.engine.Place(s, spec, engine.Copied, func(device int) ([]byte, error) {
		if v == nil {
			return bytes, nil
		}
		return cut(f.mesh, f.wholeOf(v), bytes, v.Type, device), nil
	})
}

// wholeOf gives the dimensions of an input as all devices together have it.
func (f *inputFeed) wholeOf(v *ir.Value) (dims []ir.Dim) {
	for _, d := range v.Type.Dims {
		for _, s := range v.Type.Place {
			for _, a := range f.mesh {
				if s.Dim == d.Name && a.Name == s.Axis {
					d.Size *= a.Size
				}
			}
		}
		dims = append(dims, d)
	}
	return dims
}

// run places inputs, runs a program on them and the state, and frees them.
func (f *inputFeed) run(x *engine.Executable, st *engine.State,
	inputs map[string][]byte) (*engine.Run, error) {
	s := x.Module()
	var arrays []*engine.Array
	defer func() {
		for _, a := range arrays {
			a.Free()
		}
	}()
	for _, spec := range s.Args {
		bytes, ok := inputs[spec.Name]
		if !ok {
			continue
		}
		a, err := f.place(s, spec, bytes)
		if err != nil {
			return nil, err
		}
		arrays = append(arrays, a)
	}
	// A step that has begun runs to its end; only the wait for it is canceled.
	return x.Step(context.Background(), st, arrays...)
}

// settings gives the inputs of an update.
func (t *Trainer) settings(commit bool, rate, limit float64) map[string][]byte {
	flag := []byte{0}
	if commit {
		flag[0] = 1
	}
	inputs := map[string][]byte{optim.Commit: flag, optim.LR: number(rate),
		optim.MaxNorm: number(limit)}
	for name, x := range t.programs.Optimizer.Scalars(t.updates + 1) {
		inputs[name] = number(x)
	}
	return inputs
}

// scalar reads one number of f32.
func scalar(ctx context.Context, a *engine.Array) (float64, error) {
	b, err := a.Read(ctx, 0)
	if err != nil {
		return 0, err
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b))), nil
}

func number(x float64) []byte {
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(x)))
}

func whole(list []int32) []byte {
	b := make([]byte, 0, 4*len(list))
	for _, x := range list {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}
