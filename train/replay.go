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
	"github.com/deepwell/deepwell/program"
)

// batchName is the file of a rejected step that has its rows.
const batchName = "batch.json"

// keepForReplay writes down the state before a rejected step, which is the state after it, and the
// step's rows. Only the newest is kept, and those before it are removed first. It returns the
// folder, or "" where the disk has no room for it or fails: what is kept for a look later is no
// reason to end a run.
func (t *Trainer) keepForReplay(ctx context.Context, b *data.Batch) (string, error) {
	all := filepath.Join(t.opts.Recipe.Out, "rejected")
	dir := filepath.Join(all, fmt.Sprintf("step-%08d", t.step+1))
	var full error
	if t.opts.Processes.Leads() {
		if full = t.makeRoom(all, dir, b); full != nil {
			t.warnRejected(full)
		}
	}
	if none, err := t.exec.peers.some(ctx, full != nil); none || err != nil {
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

func (t *Trainer) warnRejected(err error) {
	e := diag.From(err)
	t.opts.Events.Emit(event.Warning{Code: string(e.Code), Text: fmt.Sprintf(
		"rejected step %d is not kept for --rerun: %s", t.step+1, explain(e)), Fix: e.Fix})
}

// makeRoom removes what is kept of earlier rejected steps and writes the rows of this one, if the
// disk has room for its state and for the checkpoints that the run has still to write.
func (t *Trainer) makeRoom(all, dir string, b *data.Batch) error {
	if err := os.MkdirAll(all, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot write %s", all).Wrap(err)
	}
	removeRejected(all)
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

// ours are the names that a folder of a rejected step may have in it.
var ours = regexp.MustCompile(`^(batch\.json|\.lock|(\.tmp-|\.old-)?step-[0-9]{8,})$`)

// removeRejected removes the rejected steps that runs have kept in a folder. A folder that has
// anything else in it, or lacks the batch that is written first, is not a run's, and no link is
// followed.
func removeRejected(all string) {
	if info, err := os.Lstat(all); err != nil || !info.IsDir() {
		return
	}
	root, err := os.OpenRoot(all)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }()
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

// A Replay is what a step that was rejected comes to when its gradients are computed again.
type Replay struct {
	Step int     `json:"step"`
	Loss float64 `json:"loss"`
	Norm float64 `json:"grad_norm"`
	// Params are the gradients' norms, those that are not finite first, then the largest first.
	Params []ParamNorm `json:"params"`
}

// A ParamNorm is the norm of one parameter's gradient, and how much of it is not finite.
type ParamNorm struct {
	Name string  `json:"name"`
	Norm float64 `json:"norm"`
	Bad  int     `json:"bad"`
}

// Replay computes the gradients of a rejected step again, from the folder that the run wrote, and
// changes nothing.
func (t *Trainer) Replay(ctx context.Context, dir string) (*Replay, error) {
	if t.others != nil {
		return nil, diag.New(diag.PlanLater, "a step is replayed in one process").
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
	if err != nil || b.Rows != t.opts.Recipe.Batch || b.Seq != t.opts.Recipe.Seq {
		return nil, diag.New(diag.BadInput, "%s does not hold a batch of this run", batchName).
			At("%s", dir).Wrap(err)
	}
	c, err := ckpt.Latest(ctx, dir, t.opts.Events)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	if err := t.load(c); err != nil {
		return nil, err
	}
	r := &Replay{Step: int(c.Step) + 1}
	if r.Loss, err = t.hooks.gradients(ctx, &b); err != nil {
		return nil, err
	}
	if err := t.exec.reduce(ctx); err != nil {
		return nil, err
	}
	return r, t.norms(ctx, r)
}

// reduced reads the gradient of a parameter, after its rank has added it up.
func (t *Trainer) reduced(ctx context.Context, h *stateShard, pc *stateTensor) ([]float32, error) {
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
	return numbers(data, one.elem), nil
}

// norms reads the gradients in the state. What two ranks share, both have terms of; what stages
// have of one stack of layers is one parameter.
func (t *Trainer) norms(ctx context.Context, r *Replay) error {
	homes := t.exec.homes()
	shared, at := map[string][]float32{}, map[string]int{}
	squares := map[string]float64{}
	for _, pc := range pieces(t.programs) {
		if !pc.master {
			continue
		}
		grad, err := t.reduced(ctx, homes[pc.rank], &pc)
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
		r.Params[i].Norm, total = math.Sqrt(square), total+square
	}
	r.Norm = math.Sqrt(total)
	slices.SortStableFunc(r.Params, func(a, b ParamNorm) int {
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
