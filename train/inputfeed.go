package train

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// An inputFeed places host inputs (token ids, labels, positions, scalars) on the devices of a rank.
type inputFeed struct {
	engine *engine.Engine
	mesh   []ir.Axis
	// order permutes the tokens of a sequence where context parallelism balances causal attention;
	// nil leaves them.
	order   []int64
	sharded map[string]*ir.Value // inputs that are sharded, by name
	// noiseSeed is the recipe's seed and the step, for stochastic rounding: a resumed run draws the
	// same numbers.
	noiseSeed func() []int32
}

// newInputFeed finds out from the programs of a rank which inputs are sharded, and how. All stages
// of a rank take their data alike.
func newInputFeed(t *Trainer, p *plan.Plan, list []*step.Program) *inputFeed {
	f := &inputFeed{engine: t.opts.Engine, sharded: map[string]*ir.Value{}}
	f.noiseSeed = func() []int32 { return []int32{int32(t.opts.Recipe.Seed), int32(t.step)} }
	if p != nil {
		f.order = spmd.Order(p)
	}
	for _, one := range list {
		if f.mesh = one.Graph.Mesh; one.Stage < 0 {
			continue
		}
		// Parameters are sharded too, but they are state; only inputs of role Data come from the host.
		for _, v := range one.Graph.Inputs {
			if v.Role == ir.Data && len(v.Type.Place) > 0 {
				f.sharded[v.Name] = v
			}
		}
	}
	return f
}

// batch returns the program inputs of some sequences of a batch, by name. share weighs each label
// in the loss: one over the number of labels in the whole batch, so that the sum over microbatches
// is the mean.
func (f *inputFeed) batch(b *data.Batch, first, rows int, share float64) map[string][]byte {
	inputs := f.tokens(b, first, rows)
	noise := f.noiseSeed()
	inputs[model.InputShare], inputs[ir.InputNoise] = f32Bytes(share), int32Bytes(noise)
	// Sequences first and up differ in every microbatch; the factor is prime, so that steps of a run
	// do not draw what another draws for later sequences.
	noise[1] += int32(first) * 1_000_003
	inputs[ir.InputSlotNoise] = int32Bytes(noise)
	return inputs
}

// tokens returns the inputs of some sequences of a batch that depend on nothing else, not even on
// the step: they may be placed before it begins.
func (f *inputFeed) tokens(b *data.Batch, first, rows int) map[string][]byte {
	// Arrays of a batch are [B, S] in row-major order: sequence n begins at n·S.
	from, to := first*b.Seq, (first+rows)*b.Seq
	return map[string][]byte{
		model.InputIDs:       f.sequences(b.IDs[from:to], b.Seq),
		model.InputLabels:    f.sequences(b.Labels[from:to], b.Seq),
		model.InputPositions: f.sequences(b.Positions[from:to], b.Seq),
		model.InputSegments:  f.sequences(b.Segments[from:to], b.Seq),
		ir.InputRows:         f.sequences(countUp(int32(from), int32(to)), b.Seq),
	}
}

// countUp lists the integers from one to another. As token numbers within the step they seed
// stochastic rounding, which must not depend on how the batch is split.
func countUp(from, to int32) []int32 {
	list := make([]int32, to-from)
	for i := range list {
		list[i] = from + int32(i)
	}
	return list
}

// sequences encodes integers of shape [B, S], with the tokens of each sequence in the order in
// which context-parallel devices take them.
func (f *inputFeed) sequences(list []int32, seq int) []byte {
	if f.order == nil {
		return int32Bytes(list)
	}
	ordered := make([]int32, len(list))
	for row := 0; row < len(list); row += seq {
		for i, from := range f.order {
			ordered[row+i] = list[row+int(from)]
		}
	}
	return int32Bytes(ordered)
}

// place puts an input on the devices of a program: its shard on each, or a whole copy if it is not
// sharded.
func (f *inputFeed) place(m *program.Module, spec program.Array, bytes []byte) (*engine.Array,
	error) {
	v := f.sharded[spec.Name]
	return f.engine.Place(m, spec, engine.Copied, func(device int) ([]byte, error) {
		if v == nil {
			return bytes, nil
		}
		return shardBytes(f.mesh, f.globalDims(v), bytes, v.Type, device), nil
	})
}

// globalDims returns the dimensions of an input over all devices. Its type has the shard's.
func (f *inputFeed) globalDims(v *ir.Value) (dims []ir.Dim) {
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

// run places inputs but for those that are placed already, runs a program on them and the state,
// and frees them all.
func (f *inputFeed) run(ctx context.Context, x *engine.Executable, st *engine.State,
	inputs map[string][]byte, placed ...*engine.Array) (*engine.Run, error) {
	m := x.Module()
	arrays := placed
	defer func() {
		for _, a := range arrays {
			a.Free()
		}
	}()
	for _, spec := range m.Args {
		bytes, ok := inputs[spec.Name]
		if !ok || slices.ContainsFunc(placed, func(a *engine.Array) bool {
			return a.Name() == spec.Name
		}) {
			continue
		}
		a, err := f.place(m, spec, bytes)
		if err != nil {
			return nil, err
		}
		arrays = append(arrays, a)
	}
	// A step that has begun runs to its end; only the wait for it is canceled.
	return x.Step(ctx, st, arrays...)
}

// A stagedBatch is a batch whose first inputs are on the devices before its step begins. They are
// placed while the devices compute the step before.
type stagedBatch struct {
	batch  *data.Batch
	mu     sync.Mutex
	arrays map[stagedInput]*engine.Array // that no program has taken yet
}

// A stagedInput is an input of the sequences of a batch from first on, for a stage.
type stagedInput struct {
	stage, first int
	name         string
}

// A stagedPlace is where sequences of a batch go: a rank, and a program there that takes them.
type stagedPlace struct {
	rank         *rank
	stage, first int
	module       *program.Module
}

// stagedPlaces are what is placed ahead: the first microbatch, as the programs at work take it. It
// is called where programs may change, and [stage] where they do not matter any more.
func (c *executor) stagedPlaces() (list []stagedPlace) {
	for k, s := range c.t.programs.Stages {
		x := c.x.stage(step.Forward, k)
		if c.t.programs.Joint() {
			x = c.x.of(step.Gradient, c.ranks[s.Rank])
		}
		if c.ranks[s.Rank] != nil && x != nil {
			list = append(list, stagedPlace{c.ranks[s.Rank], k, 0, x.Module()})
		}
	}
	return list
}

// stage places the inputs of a batch ahead of its step. What cannot be placed is left to the step,
// which then says why.
func stage(b *data.Batch, places []stagedPlace, rows int) *stagedBatch {
	s := &stagedBatch{batch: b, arrays: map[stagedInput]*engine.Array{}}
	for _, p := range places {
		inputs := p.rank.tokens(b, p.first, rows)
		for _, spec := range p.module.Args {
			bytes, ok := inputs[spec.Name]
			if !ok {
				continue
			}
			if a, err := p.rank.place(p.module, spec, bytes); err == nil {
				s.arrays[stagedInput{p.stage, p.first, spec.Name}] = a
			}
		}
	}
	return s
}

// take gives an input that was placed ahead, which then is the caller's; nil if it was not. s may
// be nil.
func (s *stagedBatch) take(b *data.Batch, stage, first int, name string) *engine.Array {
	if s == nil || s.batch != b {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := stagedInput{stage, first, name}
	a := s.arrays[at]
	delete(s.arrays, at)
	return a
}

// free frees what no program has taken; s may be nil.
func (s *stagedBatch) free() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.arrays {
		a.Free()
	}
	clear(s.arrays)
}

// settings returns the scalar inputs of an update: whether to commit, learning rate, the largest
// gradient norm, and the optimizer's own (AdamW's bias corrections).
func (t *Trainer) settings(commit bool, rate, limit float64) map[string][]byte {
	flag := []byte{0}
	if commit {
		flag[0] = 1
	}
	inputs := map[string][]byte{optim.Commit: flag, optim.LR: f32Bytes(rate),
		optim.MaxNorm: f32Bytes(limit)}
	for name, x := range t.programs.Optimizer.Scalars(t.updates + 1) {
		inputs[name] = f32Bytes(x)
	}
	return inputs
}

// scalar reads one f32 from the first device.
func scalar(ctx context.Context, a *engine.Array) (float64, error) {
	b, err := a.Read(ctx, 0)
	if err != nil {
		return 0, err
	}
	return dtype.F32.Value(b), nil
}

// f32Bytes encodes a scalar as f32.
func f32Bytes(x float64) []byte {
	return dtype.F32.Append(nil, x)
}

// int32Bytes encodes integers as i32.
func int32Bytes(list []int32) []byte {
	b, _ := binary.Append(nil, binary.LittleEndian, list) // a slice of fixed size
	return b
}
