package train

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// extraKey is where a checkpoint has what the loop remembers.
const extraKey = "train"

// A memory is what the loop remembers beside the state.
type memory struct {
	Updates int    `json:"updates"` // that were accepted
	Data    string `json:"data"`    // the digest of the data
	Guard   guard  `json:"guard"`
	// Policy is the digest of what the recipe has products computed in.
	Policy string `json:"policy,omitempty"`
	// Precision is what is known of products in few bits, and which of them fell.
	Precision json.RawMessage `json:"precision,omitempty"`
}

// digested is data that has a name for all that decides which rows come in which order.
type digested interface{ Digest() string }

func digest(rows Rows) string {
	if d, ok := rows.(digested); ok {
		return d.Digest()
	}
	return ""
}

// meta describes the run as it is now.
func (t *Trainer) meta() (ckpt.Meta, error) {
	m := ckpt.Meta{Data: maps.Clone(t.at), Seed: uint64(t.Recipe.Seed),
		Programs: t.Programs.Fingerprints(), Recipe: t.Recipe.String()}
	var err error
	if m.Model, err = t.Config.Write(); err != nil {
		return m, err
	}
	name, major, minor := t.Engine.Version()
	m.Engine, err = json.Marshal(map[string]any{"name": name, "pjrt": []int{major, minor}})
	if err != nil {
		return m, err
	}
	remembered := memory{Updates: t.updates, Data: digest(t.Data), Guard: t.guard, Policy: t.policy}
	if t.sentry != nil {
		if remembered.Precision, err = t.sentry.shift(); err != nil {
			return m, err
		}
	}
	extra, err := json.Marshal(remembered)
	m.Extra = map[string]json.RawMessage{extraKey: extra}
	return m, err
}

// save writes a checkpoint of the steps that were done.
func (t *Trainer) save(ctx context.Context) error {
	return t.saveTo(ctx, t.folder(), t.Recipe.Save.Keep)
}

func (t *Trainer) saveTo(ctx context.Context, dir string, keep int) error {
	defer t.span("save")()
	start := t.Now()
	m, err := t.meta()
	if err != nil {
		return err
	}
	s := t.snapshot(ctx)
	if err := t.crew.collect(ctx, s); err != nil || !t.Processes.Leads() {
		return err
	}
	err = ckpt.Save(ctx, dir, int64(t.step), m, s, ckpt.Options{Keep: keep, Events: t.Events})
	if err != nil {
		if diag.From(err).Code == diag.CheckpointExists {
			return nil // a run that is asked to stop where it was just saved
		}
		return err
	}
	bytes := int64(0)
	for _, one := range s.Tensors() {
		bytes += one.Bytes()
	}
	t.Events.Emit(event.Saved{Step: t.step, Path: filepath.ToSlash(dir), Bytes: bytes,
		Seconds: t.Now().Sub(start).Seconds()})
	return nil
}

// resume goes on with a checkpoint.
func (t *Trainer) resume(c *ckpt.Checkpoint) error {
	m := c.Manifest
	if err := t.Recipe.Resumable([]byte(m.Recipe), t.folder()); err != nil {
		return err
	}
	var old memory
	if err := json.Unmarshal(m.Extra[extraKey], &old); err != nil {
		return diag.New(diag.CheckpointDamaged, "the checkpoint of step %d was not written by a run",
			m.Step).At("%s", t.folder()).Wrap(err)
	}
	if now := digest(t.Data); now != old.Data {
		return diag.New(diag.RecipeChanged, "the data is not what it was when the run was saved").
			At("%s", t.folder()).
			Try("restore the files and the tokenizer, or give the new run another folder: --set out=NAME")
	}
	if old.Policy != "" && old.Policy != t.policy {
		return diag.New(diag.RecipeChanged, "the policy of precision is not what it was when the run was"+
			" saved").At("%s", t.folder()).
			Try("restore it, or give the new run another folder: --set out=NAME")
	}
	if err := t.load(c); err != nil {
		return err
	}
	t.step, t.updates, t.at = int(m.Step), old.Updates, data.Position(maps.Clone(m.Data))
	if t.at == nil {
		t.at = data.Position{}
	}
	if err := t.sentry.resume(old.Precision); err != nil {
		return err
	}
	factor := t.guard.Factor
	t.guard = old.Guard
	t.guard.Factor = factor
	t.Events.Emit(event.Resumed{Step: t.step, Path: filepath.ToSlash(t.folder())})
	return nil
}

// load fills the state from a checkpoint.
func (t *Trainer) load(c ckpt.Source) error {
	return t.fill(func(pc *piece, dst []byte) error {
		for _, one := range pc.tensors {
			n := one.Bytes()
			if err := c.ReadSlice(one.Name, one.Box(), dst[:n]); err != nil {
				return err
			}
			dst = dst[n:]
		}
		return nil
	})
}
