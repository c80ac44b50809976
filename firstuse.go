package deepwell

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/firstuse"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// comparePool is the share of a GPU's memory for comparing kernels: matrices have a few megabytes.
const comparePool = 0.05

// comparer gives how far a kernel of our own is on this host's GPU from its plain form; an error
// is why it could not run.
type comparer func(ctx context.Context, spec string) (apart float64, err error)

// compareKernels compares each kernel of our own that the run's programs call with its plain form,
// on the GPU where it will run. The run's programs are written again without those that differ in
// any process.
func (r *runner) compareKernels(ctx context.Context, open func() (comparer, func())) error {
	if r.devices.gpus == nil || r.program == nil { // parity has no programs yet, and no GPUs
		return nil
	}
	specs := ownSpecs(r.program)
	if len(specs) == 0 {
		return nil
	}
	r.early().Emit(event.Phase{Verb: "train", Name: fmt.Sprintf(
		"compare %d kernels of our own with their plain forms", len(specs))})
	compare, done := open()
	refused, err := r.differing(ctx, specs, compare)
	done()
	if err := cmp.Or(ctx.Err(), err); err != nil {
		return err
	}
	if r.store != nil { // all processes run one program
		all, err := r.gathered("kernels", []byte(strings.Join(refused, "\n")),
			func(all [][]byte, _ []byte) []byte { return bytes.Join(all, []byte("\n")) })
		if err != nil {
			return err
		}
		refused = strings.Split(string(all), "\n")
	}
	refused = slices.DeleteFunc(refused, func(key string) bool { return key == "" })
	if len(refused) == 0 {
		return nil
	}
	slices.Sort(refused)
	r.refused = slices.Compact(refused)
	if err := r.writePrograms(); err != nil {
		return err
	}
	if err := withoutKernels(r.program, r.refused); err != nil {
		return err
	}
	return r.checkMemory()
}

// withoutKernels is an error if programs call a kernel that was refused.
func withoutKernels(p *step.Programs, refused []string) error {
	for _, text := range ownSpecs(p) {
		k, err := kernelOf(text)
		if err != nil {
			return err
		}
		if slices.Contains(refused, k.Key) {
			return diag.New(diag.Internal, "the kernel %s differs from its plain form, and the programs "+
				"call it still", k.Key).At("%s", text).Try("please report this")
		}
	}
	return nil
}

// differing lists the kernels that are not what their plain forms are, by their keys.
func (r *runner) differing(ctx context.Context, specs []string, compare comparer) (
	refused []string, err error) {
	for _, text := range specs {
		k, err := kernelOf(text)
		if err != nil {
			return nil, err
		}
		if slices.Contains(refused, k.Key) {
			continue
		}
		apart, err := compare(ctx, text)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err == nil && apart <= k.Limit {
			continue
		}
		refused = append(refused, k.Key)
		e := event.KernelDiffers{Kernel: k.Key, Spec: text, Apart: apart, Limit: k.Limit}
		if err != nil {
			e.Why = diag.From(err).What
		}
		r.early().Emit(e)
	}
	return refused, nil
}

// kernelOf is a kernel that a program calls.
func kernelOf(text string) (k firstuse.Kernel, err error) {
	if k, err = firstuse.Find(text); err != nil {
		return k, diag.New(diag.Internal, "a program calls a kernel that cannot be compared").
			At("%s", text).Because("%s", err).Try("please report this")
	}
	return k, nil
}

// ownSpecs lists the kernels of our own that programs call, each once. Sizes that are compared
// alike count as one.
func ownSpecs(p *step.Programs) (list []string) {
	seen := map[string]bool{}
	for _, one := range p.List {
		for _, text := range fused.SpecsIn(one.Module.Text) {
			key := text // of one that is not known, which is an error later
			if k, err := firstuse.Find(text); err == nil {
				key = k.Small
			}
			if !seen[key] {
				seen[key] = true
				list = append(list, text)
			}
		}
	}
	return list
}

// ownKernels opens this host's GPUs in a process of its own: a kernel that is wrong may end it, and
// what it did to a GPU ends with it.
func (r *runner) ownKernels() (comparer, func()) {
	runner := replay.NewRunner(replay.RunOptions{Child: r.env.Child, Environ: r.env.Environ,
		Engines: r.env.Engines, Cache: r.env.Cache, Seed: uint64(r.recipe.Seed),
		MemoryFraction: comparePool, Log: io.Discard})
	return runner.Kernel, runner.Close
}
