package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

var adamw = optim.AdamW{Beta1: abtest.Beta1, Beta2: abtest.Beta2, Eps: abtest.Eps,
	Decay: abtest.Decay, ClipNorm: abtest.Clip}

// A trainer is Deepwell's side: the gradient and the update as two programs, the state on the
// device.
type trainer struct {
	ctx          context.Context
	e            *engine.Engine
	grad, update *engine.Executable
	gradOf       *ir.Graph
	updateOf     *ir.Graph
	params       []optim.Param
	state        map[string]*engine.Array
	steps        int
}

// graphs builds the gradient and the update.
func graphs(s abtest.Size) (grad, update *ir.Graph, params []optim.Param, err error) {
	shape := model.Shape{Batch: s.Batch, Seq: s.Seq, Elem: dtype.F32}
	if s.DType == "bf16" {
		shape.MatmulType = dtype.BF16
	}
	g, err := abtest.Config(s).Graph(shape)
	if err != nil {
		return nil, nil, nil, err
	}
	if g, err = ir.Unroll(g); err != nil {
		return nil, nil, nil, err
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		return nil, nil, nil, err
	}
	if grad, err = gr.Joint(); err != nil {
		return nil, nil, nil, err
	}
	for _, v := range gr.Wrt {
		params = append(params, optim.Param{Name: v.Name, Type: v.Type, Decay: true})
	}
	update, err = adamw.Update(params)
	return grad, update, params, err
}

func newTrainer(ctx context.Context, e *engine.Engine, s abtest.Size, w *abtest.Weights,
	dump string) (*trainer, error) {
	grad, update, params, err := graphs(s)
	if err != nil {
		return nil, err
	}
	first, err := lower.StableHLO(grad, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		return nil, err
	}
	second, err := lower.StableHLO(update, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		return nil, err
	}
	if dump != "" {
		name := func(part string) string { return filepath.Join(dump, s.Name+s.DType+part) }
		if err := errors.Join(os.MkdirAll(dump, 0o755),
			os.WriteFile(name(".grad.mlir"), []byte(first), 0o644),
			os.WriteFile(name(".update.mlir"), []byte(second), 0o644)); err != nil {
			return nil, err
		}
	}
	t := &trainer{ctx: ctx, e: e, gradOf: grad, updateOf: update, params: params}
	return t, t.begin(first, second, w)
}

// oldTrainer runs programs that were written before. They take and give the same.
func oldTrainer(ctx context.Context, e *engine.Engine, s abtest.Size, w *abtest.Weights,
	dir string) (*trainer, error) {
	grad, update, params, err := graphs(s)
	if err != nil {
		return nil, err
	}
	first, err := os.ReadFile(filepath.Join(dir, s.Name+s.DType+".grad.mlir"))
	if err != nil {
		return nil, err
	}
	second, err := os.ReadFile(filepath.Join(dir, s.Name+s.DType+".update.mlir"))
	if err != nil {
		return nil, err
	}
	t := &trainer{ctx: ctx, e: e, gradOf: grad, updateOf: update, params: params}
	return t, t.begin(string(first), string(second), w)
}

// begin compiles and places the state.
func (t *trainer) begin(grad, update string, w *abtest.Weights) (err error) {
	if t.grad, err = t.compile("grad", grad); err != nil {
		return err
	}
	if t.update, err = t.compile("update", update); err != nil {
		return err
	}
	memory, err := t.grad.Memory()
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "gradient: temp %d MB\n", memory.Temp>>20)
	t.state = map[string]*engine.Array{}
	for _, x := range []struct {
		of *ir.Graph
		on *engine.Executable
	}{{t.updateOf, t.update}, {t.gradOf, t.grad}} {
		for i, v := range x.of.Inputs {
			value, ok := initial(v, w)
			if t.state[v.Name] != nil || !ok {
				continue
			}
			if t.state[v.Name], err = t.place(x.on, i, v.Type.Elem, value); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *trainer) compile(name, text string) (*engine.Executable, error) {
	return t.e.Compile(t.ctx, &program.FromText(name, text, 1).Modules[0])
}

func (t *trainer) place(x *engine.Executable, arg int, elem dtype.DType,
	value []float32) (*engine.Array, error) {
	return t.e.Place(x.Module(), x.Module().Args[arg], engine.Copied, func(int) ([]byte, error) {
		b := make([]byte, 0, 4*len(value))
		for _, v := range value {
			switch elem {
			case dtype.S32:
				b = binary.LittleEndian.AppendUint32(b, uint32(int32(v)))
			case dtype.Pred:
				b = append(b, byte(v))
			default:
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
			}
		}
		return b, nil
	})
}

// initial gives the first value of what stays on the device.
func initial(v *ir.Value, w *abtest.Weights) ([]float32, bool) {
	n := int(v.Type.Shape().Elements())
	whole := func(list []int32) []float32 {
		f := make([]float32, n)
		for i, x := range list {
			f[i] = float32(x)
		}
		return f
	}
	switch v.Name {
	case model.InputIDs:
		return whole(w.IDs), true
	case model.InputLabels:
		return whole(w.Labels), true
	case model.InputShare:
		return []float32{1 / float32(len(w.Labels))}, true
	case model.InputPositions:
		f := make([]float32, n)
		for i := range f {
			f[i] = float32(int64(i) % v.Type.Size(ir.Seq))
		}
		return f, true
	}
	if v.Means.Role == program.Moment {
		return make([]float32, n), true
	}
	return w.Param(v.Name, v.Type.Dims)
}

// Turn implements abtest.Side.
func (t *trainer) Turn(steps int) (abtest.Turn, error) { return abtest.Take(steps, t.step) }

// step makes one step and gives its loss.
func (t *trainer) step() (float64, error) {
	t.steps++
	run, err := t.grad.Run(context.Background(), t.args(t.gradOf, nil)...)
	if err != nil {
		return 0, err
	}
	defer run.Free()
	more := map[string]*engine.Array{}
	for i, p := range t.params {
		more[program.Gradient.Of(p.Name)] = run.Results[1+i]
	}
	scalars := adamw.Scalars(t.steps)
	scalars[optim.Commit], scalars[optim.LR], scalars[optim.MaxNorm] = 1, abtest.Rate, math.Inf(1)
	for i, v := range t.updateOf.Inputs {
		value, ok := scalars[v.Name]
		if !ok {
			continue
		}
		a, err := t.place(t.update, i, v.Type.Elem, []float32{float32(value)})
		if err != nil {
			return 0, err
		}
		defer a.Free()
		more[v.Name] = a
	}
	done, err := t.update.Run(context.Background(), t.args(t.updateOf, more)...)
	if err != nil {
		return 0, err
	}
	for name, next := range t.updateOf.Donations() {
		at := slices.IndexFunc(t.updateOf.Results, func(v *ir.Value) bool { return v.Name == next })
		t.state[name].Free()
		t.state[name] = done.Results[at]
	}
	if err := done.Wait(t.ctx); err != nil {
		return 0, err
	}
	b, err := run.Results[0].Read(t.ctx, 0)
	if err != nil {
		return 0, err
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b))), nil
}

func (t *trainer) args(g *ir.Graph, more map[string]*engine.Array) []*engine.Array {
	in := make([]*engine.Array, len(g.Inputs))
	for i, v := range g.Inputs {
		if in[i] = more[v.Name]; in[i] == nil {
			in[i] = t.state[v.Name]
		}
	}
	return in
}

// Stop implements abtest.Side.
func (t *trainer) Stop() {
	for _, a := range t.state {
		a.Free()
	}
	for _, x := range []*engine.Executable{t.grad, t.update} {
		if x != nil {
			x.Free()
		}
	}
}
