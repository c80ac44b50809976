package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// batchName is the file with the batch of a rejected step.
const batchName = "batch.json"

// keepRejected saves the state before a rejected step, which is also the state after it, and the
// step's batch. Only the newest rejected step is kept. It returns the folder, or "" if the disk has
// no room for it or fails: diagnostics are no reason to end a run.
func (t *Trainer) keepRejected(ctx context.Context, b *data.Batch) (string, error) {
	all := filepath.Join(t.opts.Recipe.Out, "rejected")
	dir := filepath.Join(all, fmt.Sprintf("step-%08d", t.step+1))
	// The leader alone writes and removes files; the vote keeps the processes together.
	var full error
	if t.opts.Processes.Leads() {
		if full = t.makeRoom(all, dir, b); full != nil {
			t.warnRejected(full)
		}
	}
	if none, err := t.exec.peers.any(ctx, full != nil); none || err != nil {
		return "", err
	}
	err := t.saveTo(ctx, dir, 1, nil)
	if err == nil || !writeFailed(err) {
		return filepath.ToSlash(dir), err
	}
	if t.opts.Processes.Leads() {
		t.warnRejected(err)
		removeRejected(all)
	}
	return "", nil
}

// warnRejected warns that a rejected step cannot be rerun later.
func (t *Trainer) warnRejected(err error) {
	e := diag.From(err)
	t.opts.Events.Emit(event.Warning{Code: string(e.Code), Text: fmt.Sprintf(
		"rejected step %d is not kept for --rerun: %s", t.step+1, explain(e)), Fix: e.Fix})
}

// makeRoom removes earlier rejected steps and writes the batch of this one, if the disk has room
// for its state and for the checkpoints that the run still has to write.
func (t *Trainer) makeRoom(all, dir string, b *data.Batch) error {
	if err := os.MkdirAll(all, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot write %s", all).Wrap(err)
	}
	removeRejected(all) // first: the disk may be full because of them
	there, err := ckpt.List(t.folder())
	if err != nil {
		return err
	}
	c := DiskCheck{Recipe: t.opts.Recipe, Until: t.opts.Until}
	_, more := c.saves(there)
	need := (1 + more) * checkpointBytes(t.programs)
	if left, err := t.opts.Disk(all); err == nil && left < need {
		return diag.New(diag.HostDisk, "it and the next checkpoints need %s, and the disk has %s left",
			event.Size(need), event.Size(left)).At("%s", all).Try("make room")
	}
	text, err := json.Marshal(b)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot write %s", dir).Wrap(err)
	}
	return atomicfile.Write(filepath.Join(dir, batchName), text, 0o666)
}

// ours are the file names that the folder of a rejected step may contain.
var ours = regexp.MustCompile(`^(batch\.json|\.lock|(\.tmp-|\.old-)?step-[0-9]{8,})$`)

// removeRejected removes the rejected steps that runs have kept in a folder. It touches only
// folders that a run wrote: those with a batch and nothing foreign in them. Links are not followed.
func removeRejected(all string) {
	if info, err := os.Lstat(all); err != nil || !info.IsDir() {
		return
	}
	root, err := os.OpenRoot(all)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }()
	// Through os.Root no link leads out of the folder.
	entries, _ := fs.ReadDir(root.FS(), ".")
	for _, e := range entries {
		if !e.IsDir() || !ours.MatchString(e.Name()) {
			continue
		}
		inside, err := fs.ReadDir(root.FS(), e.Name())
		if err != nil || !slices.ContainsFunc(inside, func(e fs.DirEntry) bool {
			return e.Name() == batchName && e.Type().IsRegular()
		}) || slices.ContainsFunc(inside, func(e fs.DirEntry) bool {
			return !ours.MatchString(e.Name())
		}) {
			continue
		}
		_ = root.RemoveAll(e.Name()) // what stays is tried again at the next rejected step
	}
}

// A RerunResult is what the gradients of a rejected step are when they are computed once more.
type RerunResult struct {
	// Step is the rejected step; Loss and Norm are its loss and the global gradient norm, which are
	// often not finite.
	Step int          `json:"step"`
	Loss event.Figure `json:"loss"`
	Norm event.Figure `json:"grad_norm"`
	// Params are the gradient norms by parameter: those that are not finite first, then the largest
	// first.
	Params []ParamNorm `json:"params"`
}

// A ParamNorm is the norm of one parameter's gradient, and how many of its elements are not finite.
type ParamNorm struct {
	Name string       `json:"name"`
	Norm event.Figure `json:"norm"`
	Bad  int          `json:"bad"` // elements that are NaN or infinite
}

// Rerun computes the gradients of a rejected step from the folder that the run wrote for it,
// Recipe.Out/rejected/step-N (see [event.Rejected]), without an update. It saves nothing. It
// replaces the trainer's state by the one of that step: afterwards Rerun may be called again, and
// Close, but nothing else.
func (t *Trainer) Rerun(ctx context.Context, dir string) (*RerunResult, error) {
	if err := t.usable(); err != nil && !t.reran {
		return nil, err
	}
	if t.others != nil {
		return nil, diag.New(diag.PlanLater, "a step is rerun in one process").
			Try("leave --plan and --peers away: checkpoints are the same for any number of devices")
	}
	text, err := os.ReadFile(filepath.Join(dir, batchName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.FileError, "%s is not a rejected step", dir).Wrap(err).
			Try("look into %s", filepath.Join(t.opts.Recipe.Out, "rejected"))
	} else if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	var b data.Batch
	err = json.Unmarshal(text, &b)
	if err != nil || b.Sequences != t.opts.Recipe.Batch || b.Seq != t.opts.Recipe.Seq {
		return nil, diag.New(diag.BadInput, "%s does not hold a batch of this run", batchName).
			At("%s", dir).Wrap(err)
	}
	// The folder of a rejected step is a folder of checkpoints with one step in it.
	c, err := ckpt.Latest(ctx, dir, t.opts.Events)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	batch, err := t.checkBatch(&b, t.opts.Recipe.Batch)
	if err != nil {
		return nil, diag.From(err).At("%s", filepath.Join(dir, batchName))
	}
	t.dropPrefetched()
	t.abandon(errors.New("its state is the one of the rejected step"), "a step was rerun")
	t.reran = true
	if err := t.load(ctx, c); err != nil {
		return nil, err
	}
	loss, err := t.hooks.gradients(ctx, batch)
	if err != nil {
		return nil, err
	}
	r := &RerunResult{Step: int(c.Step) + 1, Loss: event.Figure(loss)}
	if err := t.exec.reduce(ctx); err != nil {
		return nil, err
	}
	return r, t.norms(ctx, r)
}

// reduced reads the gradient of a parameter after [executor.reduce], whole.
func (t *Trainer) reduced(ctx context.Context, h *stateShard, pc *stateTensor) ([]float32, error) {
	// The gradient is sharded as the parameter is stored, in the type that gradients are reduced in.
	one := *pc
	for _, held := range t.programs.Ranks[pc.rank].RankParams {
		if held.Name == pc.name {
			one.elem = held.Type.Elem
		}
	}
	one.tensors = slices.Clone(pc.tensors)
	for i := range one.tensors {
		one.tensors[i].DType = one.elem
	}
	data, err := gather(ctx, h.state.Get(program.Gradient.Of(pc.name)), &one, h.mesh)
	if err != nil {
		return nil, err
	}
	return floats(data, one.elem), nil
}

// norms reads all gradients. Of a parameter that two ranks share, both have a term; a stack of
// layers that stages split is one parameter.
func (t *Trainer) norms(ctx context.Context, r *RerunResult) error {
	shards := t.exec.stateShards()
	// Gradients are added per parameter over its stages; of a shared one the terms are added first,
	// since the norm is not linear.
	shared, at := map[string][]float32{}, map[string]int{}
	squares := map[string]float64{}
	for _, pc := range stateTensors(t.programs) {
		if !pc.master {
			continue
		}
		grad, err := t.reduced(ctx, shards[pc.rank], &pc)
		if err != nil {
			return err
		}
		if len(t.programs.Users(pc.name)) > 1 {
			if shared[pc.name] == nil {
				shared[pc.name] = grad
				continue
			}
			for i, x := range shared[pc.name] {
				grad[i] += x
			}
		}
		name := pc.param.Name
		if _, ok := at[name]; !ok {
			at[name] = len(r.Params)
			r.Params = append(r.Params, ParamNorm{Name: name})
		}
		one := &r.Params[at[name]]
		for _, x := range grad {
			if math.IsNaN(float64(x)) || math.IsInf(float64(x), 0) {
				one.Bad++
			}
			squares[name] += float64(x) * float64(x)
		}
	}
	total := 0.0
	for i := range r.Params {
		square := squares[r.Params[i].Name]
		r.Params[i].Norm, total = event.Figure(math.Sqrt(square)), total+square
	}
	r.Norm = event.Figure(math.Sqrt(total))
	lists.Sort(r.Params, func(a, b ParamNorm) int {
		switch {
		case (a.Bad > 0) != (b.Bad > 0):
			return b.Bad - a.Bad
		case a.Norm > b.Norm:
			return -1
		case a.Norm < b.Norm:
			return 1
		}
		return strings.Compare(a.Name, b.Name)
	})
	return nil
}
