package train

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// Hasty lets the programs be compiled without optimization and by XLA's older emitters, in a third
// of the time; but not updates: two ranks that have one table update it by programs of their own,
// which then round alike only if they are compiled well (-plans.seed=1627554524673692800 on Qwen3).
func Hasty(p *step.Programs) {
	for _, row := range p.List {
		if row.Kind == step.Update {
			continue
		}
		flags := map[string]any{"xla_backend_optimization_level": int64(0),
			"xla_cpu_use_fusion_emitters": false}
		maps.Copy(flags, row.Module.Flags)
		row.Module.Flags = flags
	}
}

// Blocks gives the copies of weights that products in few bits take, as bytes: joined over devices,
// layer by layer, each in the order of its parameter's dimensions with those that are summed over
// last. Names are those of checkpoints and the ends of the names of copies.
func (t *Trainer) Blocks(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	homes := t.exec.homes()
	for _, pc := range pieces(t.Programs) {
		h := homes[pc.rank]
		if !pc.master || h == nil {
			continue
		}
		rank := t.Programs.Ranks[pc.rank]
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
					all[one.Name+strings.TrimPrefix(name, program.Copy.Of(pc.name))] = data[k*n:][:n]
				}
			}
		}
	}
	return all, nil
}

// joined puts the pieces of a copy together.
func joined(ctx context.Context, h *stateShard, name string, pc *stateTensor, c *ir.Copy,
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
			spmd.Join(h.mesh, dims, whole, part, device, b)
		} else if !slices.Equal(b, spmd.Cut(h.mesh, dims, whole, part, device)) {
			return nil, fmt.Errorf("devices have different copies of %s", name)
		}
	}
	return whole, nil
}

// Requantize makes the copies of weights again.
func (t *Trainer) Requantize() error { return t.exec.quantize() }

// State gives what this process has of the state, by the names of checkpoints.
func (t *Trainer) State(ctx context.Context) (map[string][]byte, error) {
	all := map[string][]byte{}
	homes := t.exec.homes()
	for _, pc := range pieces(t.Programs) {
		h := homes[pc.rank]
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

// Restore goes on from another's state.
func (t *Trainer) Restore(all map[string][]byte) error {
	return t.fill(t.computed(func(name string, _ *model.Param, dst []byte) error {
		if len(all[name]) != len(dst) {
			return fmt.Errorf("the state has %d bytes of %s, not %d", len(all[name]), name, len(dst))
		}
		copy(dst, all[name])
		return nil
	}))
}
