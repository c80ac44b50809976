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
	Updates int `json:"updates"` // that were accepted
	// OwesEval says that the validation after this step was given up, and is to be made.
	OwesEval bool   `json:"owes_eval,omitempty"`
	Data     string `json:"data"` // the digest of the data
	Guard    guard  `json:"guard"`
	// Policy is the digest of what the recipe has products computed in.
	Policy string `json:"policy,omitempty"`
	// Precision is what is known of products in few bits, and which of them fell.
	Precision json.RawMessage `json:"precision,omitempty"`
	// Eval is the digest of the data of the validation, if it is not held out of the training data.
	Eval string `json:"eval,omitempty"`
	// Plan and Options are digests of the plan and of the programs' compile options, and Build names
	// the Deepwell that wrote the checkpoint.
	Plan    string `json:"plan,omitempty"`
	Options string `json:"options,omitempty"`
	Build   string `json:"build,omitempty"`
}

// digested is data that has a name for all that decides which rows come in which order.
type digested interface{ Digest() string }

func digest(rows Rows) string {
	if d, ok := rows.(digested); ok {
		return d.Digest()
	}
	return ""
}

// adopt reports whether rows are those of a digest, or can be: data that was split in an older way
// goes on with that.
func adopt(rows Rows, old string) bool {
	if d, ok := rows.(interface{ Adopt(digest string) bool }); ok {
		return d.Adopt(old)
	}
	return digest(rows) == old
}

// meta describes the run as it is now.
func (t *Trainer) meta() (ckpt.Meta, error) {
	m := ckpt.Meta{Data: maps.Clone(t.at), Seed: uint64(t.Recipe.Seed),
		Programs: t.Programs.Fingerprints(), Recipe: t.Recipe.String()}
	var err error
	if m.Model, err = t.Config.Write(); err != nil {
		return m, err
	}
	if m.Engine, err = json.Marshal(t.Engine.Identity()); err != nil {
		return m, err
	}
	remembered := memory{Updates: t.updates, Data: digest(t.Data), Guard: t.guard, Policy: t.policy,
		Eval: t.evalDigest(), Plan: t.Programs.PlanDigest(),
		Options: t.Programs.OptionsDigest(), Build: t.Build, OwesEval: t.owes}
	if t.controller != nil {
		if remembered.Precision, err = t.controller.shift(); err != nil {
			return m, err
		}
	}
	extra, err := json.Marshal(remembered)
	m.Extra = map[string]json.RawMessage{extraKey: extra}
	return m, err
}

// newest opens the newest checkpoint of the run, unless it is of another one; nil if there is none.
func (t *Trainer) newest(ctx context.Context) (*ckpt.Checkpoint, *memory, error) {
	c, err := ckpt.Latest(ctx, t.folder(), t.Events)
	if err != nil {
		if diag.From(err).Code == diag.CheckpointMissing {
			err = nil
		}
		return nil, nil, err
	}
	old, err := t.sameRun(c)
	if err != nil {
		_ = c.Close()
		return nil, nil, err
	}
	return c, old, nil
}

// resume goes on with a checkpoint of this run.
func (t *Trainer) resume(ctx context.Context, c *ckpt.Checkpoint, old *memory) error {
	if err := t.load(c); err != nil {
		return err
	}
	m := &c.Manifest
	t.step, t.updates, t.at = int(m.Step), old.Updates, data.Position(maps.Clone(m.Data))
	if t.at == nil {
		t.at = data.Position{}
	}
	if err := t.controller.resume(ctx, old.Precision); err != nil {
		return err
	}
	t.saved, t.owes = t.step, old.OwesEval
	factor := t.guard.Factor
	t.guard = old.Guard
	t.guard.Factor = factor
	t.compare(m, old)
	t.Events.Emit(event.Resumed{Step: t.step, Path: filepath.ToSlash(t.folder())})
	return nil
}

// load fills the state from a checkpoint of the same tensors.
func (t *Trainer) load(c ckpt.Source) error {
	if err := t.fits(c); err != nil {
		return err
	}
	return t.fill(c)
}
