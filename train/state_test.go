package train

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// quantizedCopies reads the quantized copies of weights that GEMMs take, as bytes: joined over
// devices, layer by layer, each in the order of its parameter's dimensions with the contracted ones
// last. A name is the parameter's in checkpoints, and the suffix of the copy.
func (t *Trainer) quantizedCopies(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		h := shards[pc.rank]
		if !pc.master || h == nil {
			continue
		}
		rank := t.programs.Ranks[pc.rank]
		g, copies := rank.Quantize, rank.Copies()
		for _, c := range copies {
			if c.Param != pc.name {
				continue
			}
			for _, name := range c.Names {
				i := slices.IndexFunc(g.Results, func(v *ir.Value) bool { return v.Name == name })
				data, err := joined(ctx, h, name, &pc, &c, g.Results[i].Type)
				if err != nil {
					return nil, err
				}
				n := len(data) / len(pc.tensors)
				for k, one := range pc.tensors {
					// How the shards lie is not the matter here.
					kind := by.ReplaceAllString(strings.TrimPrefix(name, program.Copy.Of(pc.name)), "")
					all[one.Name+kind] = data[k*n:][:n]
				}
			}
		}
	}
	return all, nil
}

// by is the part of a copy's name that says which dimension its shards were moved to.
var by = regexp.MustCompile(`\.by_[a-z_]+`)

// joined puts the shards of a copy together.
func joined(ctx context.Context, h *stateShard, name string, pc *stateTensor, c *ir.QuantizedParam,
	part ir.Type) ([]byte, error) {
	a := h.state.Get(name)
	if a == nil {
		return nil, fmt.Errorf("the state has no %s", name)
	}
	if part.Elem == dtype.F32 {
		return a.Read(ctx, 0) // the largest magnitude, of which all have a copy
	}
	var dims []ir.Dim
	for _, d := range pc.param.Dims {
		if !slices.Contains(c.Along, d.Name) {
			dims = append(dims, d)
		}
	}
	for _, along := range c.Along {
		i := slices.IndexFunc(pc.param.Dims, func(d ir.Dim) bool { return d.Name == along })
		dims = append(dims, pc.param.Dims[i])
	}
	// Two numbers of four bits are a byte, and a scale is one for a block.
	part.Dims = slices.Clone(part.Dims)
	last := len(dims) - 1
	switch {
	case part.Elem == dtype.F4E2M1FN:
		dims[last].Size, part.Dims[last].Size = dims[last].Size/2, part.Dims[last].Size/2
	case strings.HasSuffix(name, ".scale"):
		dims[last].Size /= c.Format.Block()
	}
	whole := make([]byte, (ir.Type{Elem: dtype.U8, Dims: dims}).Shape().Elements())
	for device := range a.Parts() {
		b, err := a.Read(ctx, device)
		if err != nil {
			return nil, err
		}
		if first(h.mesh, part, device) {
			spmd.PutShard(h.mesh, dims, whole, part, device, b)
		} else if !slices.Equal(b, spmd.TakeShard(h.mesh, dims, whole, part, device)) {
			return nil, fmt.Errorf("devices have different copies of %s", name)
		}
	}
	return whole, nil
}

// state reads what this process has of the state, by the names of checkpoints.
func (t *Trainer) state(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		h := shards[pc.rank]
		if h == nil {
			continue
		}
		b, err := gather(ctx, h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return nil, err
		}
		n := len(b) / len(pc.tensors)
		for k, one := range pc.tensors {
			all[one.Name] = b[k*n:][:n]
		}
	}
	return all, nil
}

// restore continues from another trainer's state.
func (t *Trainer) restore(ctx context.Context, all map[string][]byte) error {
	return t.fill(ctx, t.computed(func(name string, _ *model.Param, dst []byte) error {
		if len(all[name]) != len(dst) {
			return fmt.Errorf("the state has %d bytes of %s, not %d", len(all[name]), name, len(dst))
		}
		copy(dst, all[name])
		return nil
	}))
}

// gradients reads the gradients between the halves of a step, by the names of checkpoints: what
// this process has of them, summed over its devices in f64.
func (t *Trainer) gradients(ctx context.Context) (map[string][]float64, error) {
	grads := map[string][]float64{}
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		if !pc.master || shards[pc.rank] == nil {
			continue
		}
		a := shards[pc.rank].state.Get(program.Gradient.Of(pc.name))
		sum, err := summed(ctx, a, &pc, shards[pc.rank].mesh, t.gradientType(&pc))
		if err != nil {
			return nil, err
		}
		n := len(sum) / len(pc.tensors)
		for k, one := range pc.tensors {
			old := grads[one.Name]
			for i, x := range sum[k*n:][:n] {
				if old == nil {
					grads[one.Name] = append(grads[one.Name], x)
				} else {
					old[i] += x // another rank has a term of it, too
				}
			}
		}
	}
	return grads, nil
}

// gradientType is the type of a parameter's gradient between the halves of a step.
func (t *Trainer) gradientType(pc *stateTensor) ir.Type {
	for _, h := range t.programs.Ranks[pc.rank].RankParams {
		if h.Name == pc.name {
			return h.Type
		}
	}
	return ir.Type{}
}

// summed joins shards and adds up terms.
func summed(ctx context.Context, a *engine.Array, pc *stateTensor, mesh []ir.Axis,
	part ir.Type) ([]float64, error) {
	dims := pc.param.Dims
	if pc.layout != nil {
		dims = pc.layout.Whole
	}
	total := make([]float64, pc.param.Size())
	for device := range a.Parts() {
		if !first(mesh, part, device) {
			continue
		}
		b, err := a.Read(ctx, device)
		if err != nil {
			return nil, err
		}
		one := make([]float32, len(total))
		spmd.PutShard(mesh, dims, one, part, device, floats(b, part.Elem))
		for i, x := range one {
			total[i] += float64(x)
		}
	}
	return total, nil
}

// params reads the parameters in f64.
func (t *Trainer) params(ctx context.Context) (map[string][]float64, error) {
	read, err := t.Params(ctx)
	all := map[string][]float64{}
	for name, list := range read {
		for _, x := range list {
			all[name] = append(all[name], float64(x))
		}
	}
	return all, err
}

// footprints are the predicted bytes of each rank, from the compiler's report on the programs at
// work.
func (t *Trainer) footprints() ([]*step.Footprint, error) {
	needs, err := t.needs()
	if err != nil {
		return nil, err
	}
	return t.programs.Footprints(needs)
}

// census compares the collectives of the compiled programs with the collectives of their graphs.
func (t *Trainer) census() error {
	graphs := t.programs.Graphs()
	for _, x := range t.exec.x.list() {
		m, err := x.Optimized()
		if err != nil {
			return err
		}
		list := spmd.CensusOf(graphs[x.Module().Name])
		if off := list.Diff(m.Collectives(), true, dtype.F32); off != nil {
			return fmt.Errorf("%s: %w", x.Module().Name, off)
		}
	}
	return nil
}

// inspected reports whether the last step measured rounding errors. If it did, the
// programs that measured must have the collectives of their graphs.
func (t *Trainer) inspected() (bool, error) {
	if _, inspected := t.controller.reader.statRows(t.exec.reports()); !inspected {
		return false, nil
	}
	for row, x := range t.controller.probes.x.rows {
		m, err := x.Optimized()
		if err != nil {
			return true, err
		}
		list := spmd.CensusOf(row.Graph)
		if off := list.Diff(m.Collectives(), true, dtype.F32); off != nil {
			return true, fmt.Errorf("an inspection: %w", off)
		}
	}
	return true, nil
}
