package train

import (
	"context"
	"encoding/json"
	"maps"
	"path/filepath"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
)

// extraKey is the entry of a checkpoint's manifest that holds the loop's own state.
const extraKey = "train"

// loopState is what a checkpoint holds beside tensors: counters, histories and the digests by which
// a resumed run is compared. Field names are part of the format; fields that an older binary did
// not write are zero.
type loopState struct {
	Updates int `json:"updates"` // that were accepted
	// OwesEval says that the validation after this step was given up for a stop, and is to be made up
	// for.
	OwesEval bool   `json:"owes_eval,omitempty"`
	Data     string `json:"data"` // the digest of the data
	Guard    guard  `json:"guard"`
	// Policy is the digest of the recipe's precision policy.
	Policy string `json:"policy,omitempty"`
	// Rounding is the version of what stochastic rounding draws; checkpoints before 2 do not say it.
	Rounding int `json:"rounding,omitempty"`
	// Precision is the monitor's history, and the GEMMs that fell back to a wider format.
	Precision json.RawMessage `json:"precision,omitempty"`
	// Slots is the size of experts' slots that steps begin with, by its place in the plan's list.
	Slots int `json:"slots,omitempty"`
	// Eval is the digest of the validation data, if it is not held out of the training data.
	Eval string `json:"eval,omitempty"`
	// Plan and Options are digests of the plan and of the programs' compile options; Build names the
	// Deepwell that wrote the checkpoint.
	Plan    string `json:"plan,omitempty"`
	Options string `json:"options,omitempty"`
	Build   string `json:"build,omitempty"`
}

// digest returns the digest of a dataset, or "" if it has none.
func digest(rows Dataset) string {
	if d, ok := rows.(Digester); ok {
		return d.Digest()
	}
	return ""
}

// adopt reports whether a dataset has a digest, or can take it on.
func adopt(rows Dataset, old string) bool {
	if d, ok := rows.(Adopter); ok {
		return d.Adopt(old)
	}
	return digest(rows) == old
}

// manifest describes the run at its present step.
func (t *Trainer) manifest() (ckpt.Meta, error) {
	m := ckpt.Meta{Data: maps.Clone(t.at), Seed: uint64(t.opts.Recipe.Seed),
		Programs: t.programs.Fingerprints(), Recipe: t.opts.Recipe.String()}
	m.Model = t.config
	var err error
	if m.Engine, err = json.Marshal(t.opts.Engine.Identity()); err != nil {
		return m, err
	}
	remembered := loopState{Updates: t.updates, Data: digest(t.opts.Data), Guard: t.guard,
		Policy: t.policy, Rounding: block.RoundingVersion, Eval: t.evalDigest(),
		Plan:    t.programs.PlanDigest(),
		Options: t.programs.OptionsDigest(), Build: t.opts.Build, OwesEval: t.owes}
	if t.exec.ladder != nil {
		remembered.Slots = t.exec.ladder.rung
	}
	if t.controller != nil {
		if remembered.Precision, err = t.controller.shift(); err != nil {
			return m, err
		}
	}
	extra, err := json.Marshal(remembered)
	m.Extra = map[string]json.RawMessage{extraKey: extra}
	return m, err
}

// configOf returns the config.json of a model, which checkpoints keep. It is nil, with a warning,
// if the model is a graph or a configuration that transformers does not know.
func configOf(m model.Model, events event.Sink) []byte {
	why := "it is not a model.Config"
	if c, ok := m.(interface{ Write() ([]byte, error) }); ok {
		text, err := c.Write()
		if err == nil {
			return text
		}
		why = diag.From(err).What
	}
	events.Emit(event.Warning{Text: "checkpoints of this model have no config.json and cannot be " +
		"exported: " + why})
	return nil
}

// newest opens the newest intact checkpoint in the run's folder; nil if it has no
// checkpoint. A checkpoint of another run is an error.
func (t *Trainer) newest(ctx context.Context) (*ckpt.Checkpoint, *loopState, error) {
	c, err := ckpt.Latest(ctx, t.folder(), t.opts.Events)
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

// Load continues from another checkpoint of this run: path is the folder of one step, such as
// run/checkpoints/step-00000100. Everything is as it was then: the state, the position in the data,
// the guard's history and the precision of the GEMMs. A checkpoint of another recipe, model or
// dataset is refused; a model that has no config.json is known by its tensors only, and other
// programs for the same tensors are a warning. To begin a run with the weights of another, use
// Options.Init. An error after the first bytes of the state were replaced leaves a trainer that
// can only be closed. Later checkpoints stay in the run's folder: Save does not replace them, and
// New resumes from the newest.
func (t *Trainer) Load(ctx context.Context, path string) error {
	if err := t.usable(); err != nil {
		return err
	}
	c, err := ckpt.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	old, err := t.sameRun(c)
	if err != nil {
		return err
	}
	t.dropPrefetched()
	t.pending = false
	if err := t.resume(ctx, c, old); err != nil {
		t.abandon(err, "%s was not loaded whole", path)
		return t.canceled(ctx, err)
	}
	if filepath.Dir(filepath.Clean(path)) != filepath.Clean(t.folder()) {
		t.saved = -1 // the run's own folder does not have it
	}
	return t.others.agree(ctx, t.begun())
}

// resume continues with a checkpoint of this run. The spike factor is the recipe's, which may have
// changed.
func (t *Trainer) resume(ctx context.Context, c *ckpt.Checkpoint, old *loopState) error {
	if err := t.load(ctx, c); err != nil {
		return err
	}
	// The position in the data is the one after the saved step, so the next batch is the one that
	// would have come.
	m := &c.Manifest
	t.step, t.updates, t.at = int(m.Step), old.Updates, data.Position(maps.Clone(m.Data))
	if t.at == nil {
		t.at = data.Position{}
	}
	if err := t.controller.resume(ctx, old.Precision); err != nil {
		return err
	}
	if t.exec.ladder != nil {
		t.exec.ladder.rung = min(old.Slots, t.programs.Rungs()-1)
	}
	t.saved, t.owes = t.step, old.OwesEval
	factor := t.guard.Factor
	t.guard = old.Guard
	t.guard.Factor = factor
	t.compare(m, old)
	t.opts.Events.Emit(event.Resumed{Step: t.step,
		Path: filepath.ToSlash(filepath.Dir(c.Path()))})
	return nil
}

// load fills the state from a checkpoint that has exactly its tensors.
func (t *Trainer) load(ctx context.Context, c ckpt.Source) error {
	if err := t.fits(c); err != nil {
		return err
	}
	return t.fill(ctx, c)
}
