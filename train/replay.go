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
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/spmd"
)

// batchName is the file of a rejected step that has its rows.
const batchName = "batch.json"

// keepForReplay writes down the state before a rejected step, which is the state after it, and the
// step's rows.
func (t *Trainer) keepForReplay(ctx context.Context, b *data.Batch) (string, error) {
	dir := filepath.Join(t.Recipe.Out, "rejected", fmt.Sprintf("step-%08d", t.step+1))
	if !t.Processes.Leads() {
		return filepath.ToSlash(dir), t.saveTo(ctx, dir, 1) // sends its pieces
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", diag.New(diag.FileError, "cannot write %s", dir).Wrap(err)
	}
	text, err := json.Marshal(b)
	if err != nil {
		return "", err
	}
	if err := atomicfile.Write(filepath.Join(dir, batchName), text, 0o666); err != nil {
		return "", err
	}
	return filepath.ToSlash(dir), t.saveTo(ctx, dir, 1)
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
	m, ok := t.crew.(*mesh)
	// Gradients on a mesh are terms of sums that only updates add up.
	if !ok || t.Programs.Sharding != nil {
		return nil, diag.New(diag.PlanLater, "a step is replayed on one device").
			Try("leave --plan away: checkpoints are the same for any number of devices")
	}
	text, err := os.ReadFile(filepath.Join(dir, batchName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.FileError, "%s is not a rejected step", dir).Wrap(err).
			Try("look into %s", filepath.Join(t.Recipe.Out, "rejected"))
	} else if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	var b data.Batch
	err = json.Unmarshal(text, &b)
	if err != nil || b.Rows != t.Recipe.Batch || b.Seq != t.Recipe.Seq {
		return nil, diag.New(diag.BadInput, "%s does not hold a batch of this run", batchName).
			At("%s", dir).Wrap(err)
	}
	c, err := ckpt.Latest(ctx, dir, t.Events)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	if err := t.load(c); err != nil {
		return nil, err
	}
	r := &Replay{Step: int(c.Step) + 1}
	if r.Loss, err = m.gradients(ctx, &b); err != nil {
		return nil, err
	}
	return r, m.norms(ctx, r)
}

// norms reads the gradients in the state.
func (m *mesh) norms(ctx context.Context, r *Replay) error {
	total := 0.0
	for _, p := range m.t.Programs.Step.Params {
		a := m.state.Get(spmd.GradientOf(p.Name))
		bytes, err := a.Read(ctx, 0)
		if err != nil {
			return err
		}
		one, sum := ParamNorm{Name: p.Name}, 0.0
		for _, x := range numbers(bytes, p.Type.Elem) {
			if math.IsNaN(float64(x)) || math.IsInf(float64(x), 0) {
				one.Bad++
			}
			sum += float64(x) * float64(x)
		}
		one.Norm, total = math.Sqrt(sum), total+sum
		r.Params = append(r.Params, one)
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
