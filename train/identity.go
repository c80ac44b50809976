package train

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
)

// evalDigest is the digest of the validation data, if it comes from files of its own; sequences
// held out of the training data are covered by that digest.
func (t *Trainer) evalDigest() string {
	d, ok := t.opts.Eval.(Digester)
	if !ok || d.Digest() == digest(t.opts.Data) {
		return ""
	}
	return d.Digest()
}

// sameRun refuses a checkpoint that does not belong to this run: another recipe, dataset, model or
// precision policy, or tensors of other shapes. It returns the saved loop state.
func (t *Trainer) sameRun(c *ckpt.Checkpoint) (*loopState, error) {
	// From the recipe to the tensors: the first error names what a person can act on.
	m := c.Manifest
	if err := t.opts.Recipe.Resumable([]byte(m.Recipe), t.folder()); err != nil {
		return nil, err
	}
	old := &loopState{}
	if err := json.Unmarshal(m.Extra[extraKey], old); err != nil {
		return nil, diag.New(diag.CheckpointDamaged, "the checkpoint of step %d was not written by a run",
			m.Step).At("%s", t.folder()).Wrap(err)
	}
	if !adopt(t.opts.Data, old.Data) {
		return nil, diag.New(diag.RecipeChanged, "the data is not what it was when the run was saved").
			At("%s", t.folder()).
			Try("restore the files and the tokenizer, or give the new run another folder: --set out=NAME")
	}
	if err := t.sameModel(m.Model); err != nil {
		return nil, err.At("%s", t.folder())
	}
	// Before the policy, which names layers: another number of them would be called its fault.
	if err := t.fits(c); err != nil {
		return nil, err
	}
	if len(old.Precision) > 0 && !t.programs.Policy.Quantizes() {
		return nil, diag.New(diag.RecipeChanged, "the checkpoint has fallbacks of quantized GEMMs,"+
			" and this run quantizes none").At("%s", t.folder()).
			Try("restore precision, or give the new run another folder: --set out=NAME")
	}
	if old.Policy != "" && old.Policy != t.policy {
		return nil, diag.New(diag.RecipeChanged, "the policy of precision is not what it was when the"+
			" run was saved").At("%s", t.folder()).
			Try("restore it, or give the new run another folder: --set out=NAME")
	}
	if err := t.sameRounding(max(old.Rounding, 1)); err != nil {
		return nil, err
	}
	return old, nil
}

// sameRounding refuses to go on with gradients that are rounded by other random bits than before:
// the run would not be one that any binary can make again.
func (t *Trainer) sameRounding(was int) error {
	chance := lists.Filter(dtype.Formats(), dtype.Format.Stochastic)
	if was == block.RoundingVersion || !slices.ContainsFunc(chance, t.programs.Policy.Has) {
		return nil
	}
	return diag.New(diag.RecipeChanged, "the run was saved with version %d of stochastic rounding; "+
		"this binary rounds by version %d", was, block.RoundingVersion).At("%s", t.folder()).
		Try("go on with the Deepwell that saved it, or begin a new run from its weights in another " +
			"folder: --set out=NAME")
}

// labels are keys of config.json that do not change what a model computes.
var labels = []string{"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
	"torch_dtype", "transformers_version"}

// sameModel refuses a checkpoint of another model. Both configurations are printed by this binary,
// so that a key which an older version wrote differently does not count as a change.
func (t *Trainer) sameModel(saved json.RawMessage) *diag.Error {
	if len(saved) == 0 {
		return nil
	}
	old, failed := printed(saved)
	if failed != nil {
		return failed
	}
	now, err := members(t.config)
	if err != nil {
		return diag.From(err)
	}
	// Labels may change, with a warning: a run may be given another end-of-text token.
	var changes, renamed []string
	for _, key := range keysOf(old, now) {
		a, b := old[key], now[key]
		switch {
		case bytes.Equal(a, b):
		case !slices.Contains(labels, key):
			changes = append(changes, key+" was "+orNone(a)+", now it is "+orNone(b))
		case a != nil:
			renamed = append(renamed, key+" was "+orNone(a)+", now it is "+orNone(b))
		}
	}
	if len(changes) > 0 {
		return diag.New(diag.RecipeChanged, "the model is not the one that was saved: %s",
			strings.Join(changes, "; ")).
			Try("restore its config.json or archive, or give the new run another folder: --set out=NAME")
	}
	if len(renamed) > 0 {
		t.opts.Events.Emit(event.Warning{Code: string(diag.RunDiffers),
			Text: "checkpoints will have what config.json says now: " + strings.Join(renamed, "; ")})
	}
	return nil
}

// printed returns the members of a checkpoint's config.json as this binary would write it. Of a
// program that was captured it is what the checkpoint says.
func printed(saved json.RawMessage) (map[string]json.RawMessage, *diag.Error) {
	list, err := members(saved)
	if err == nil && string(list["model_type"]) == strconv.Quote(model.Captured) {
		return list, nil
	}
	was, err := model.Parse(saved)
	if err != nil {
		return nil, diag.New(diag.CheckpointDamaged, "the checkpoint's model cannot be read").Wrap(err)
	}
	text, err := was.Write()
	if err != nil {
		return nil, diag.From(err)
	}
	if list, err = members(text); err != nil {
		return nil, diag.From(err)
	}
	return list, nil
}

// members returns the values of a config.json by key, in compact JSON.
func members(text []byte) (list map[string]json.RawMessage, err error) {
	if text == nil {
		return nil, nil
	}
	var b bytes.Buffer
	if err := json.Compact(&b, text); err != nil {
		return nil, err
	}
	return list, json.Unmarshal(b.Bytes(), &list)
}

// orNone prints a value for a person.
func orNone(value json.RawMessage) string { return cmp.Or(string(value), "not there") }

// keysOf returns the keys of both maps, sorted.
func keysOf[V any](a, b map[string]V) []string {
	all := map[string]V{}
	maps.Copy(all, a)
	maps.Copy(all, b)
	return slices.Sorted(maps.Keys(all))
}

// fits demands that a checkpoint has exactly the tensors of the state: all of them, in their shapes
// and types. Otherwise a smaller model could begin with a corner of a larger one.
func (t *Trainer) fits(c ckpt.Source) error {
	// Tensors of the checkpoint that the state has not claimed yet.
	left := map[string]ckpt.Tensor{}
	for _, one := range c.Tensors() {
		left[one.Name] = one
	}
	bad := func(format string, args ...any) error {
		e := diag.New(diag.CheckpointTensor, format, args...).
			Try("go on with the model and optimizer that wrote the checkpoint")
		if c, ok := c.(*ckpt.Checkpoint); ok {
			e = e.At("%s", c.Path())
		}
		return e
	}
	seen := map[string]bool{} // what two ranks have stands twice
	for _, pc := range stateTensors(t.programs) {
		for _, one := range pc.tensors {
			have, ok := left[one.Name]
			switch {
			case seen[one.Name]:
				continue
			case !ok:
				return bad("the checkpoint has no tensor %q", one.Name)
			case have.DType != one.DType || !slices.Equal(have.Shape, one.Shape):
				return bad("the checkpoint has %q as %v %v, the model as %v %v", one.Name, have.DType,
					have.Shape, one.DType, one.Shape)
			}
			seen[one.Name] = true
			delete(left, one.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(left)) {
		return bad("the checkpoint has %q, and the model does not", name)
	}
	return nil
}

// compare warns of everything that has changed since a checkpoint was written and may change bits
// although the run is the same: programs, engine, processor, environment. What an older checkpoint
// did not record is not compared.
func (t *Trainer) compare(m *ckpt.Manifest, old *loopState) {
	if now := t.evalDigest(); old.Eval != "" && now != "" && now != old.Eval {
		t.opts.Events.Emit(event.Warning{Code: string(diag.RunDiffers),
			Text: "eval.data is not what it was when the run was saved: validation losses from here on" +
				" cannot be compared with those before", Fix: "restore the files, or compare anew"})
	}
	if was, err := recipe.Saved([]byte(m.Recipe), t.folder()); err == nil {
		t.otherLength(was.Steps)
	}
	changes := t.otherPrograms(m.Programs, old)
	var was engine.Identity
	if err := json.Unmarshal(m.Engine, &was); err == nil {
		changes = append(changes, otherEngine(was, t.opts.Engine.Identity())...)
	}
	if old.Build != "" && t.opts.Build != "" && old.Build != t.opts.Build {
		changes = append(changes, "Deepwell "+old.Build+" → "+t.opts.Build)
	}
	if len(changes) > 0 {
		t.opts.Events.Emit(event.Warning{Code: string(diag.RunDiffers),
			Text: "the run will not end with the same bits as one that was never stopped: " +
				strings.Join(changes, "; "), Fix: "none is needed if equal bits are not"})
	}
}

// otherLength warns of a changed number of steps where the remaining steps depend on it: a learning
// rate that decays, or a final BF16 phase.
func (t *Trainer) otherLength(was int) {
	// A constant learning rate does not depend on the length, so such a run may be extended freely.
	now, what := t.opts.Recipe.Steps, ""
	switch {
	case was == now:
		return
	case t.opts.Recipe.Optimizer.Schedule != "constant":
		what = "the learning rate follows " + t.opts.Recipe.Optimizer.Schedule + " over the new length"
	case t.opts.Recipe.FinalBF16 > 0:
		what = "the last steps in bf16 begin elsewhere"
	default:
		return
	}
	t.opts.Events.Emit(event.Warning{Code: string(diag.RunDiffers),
		Text: fmt.Sprintf("steps was %d when the run was saved, now it is %d: from here on %s", was, now,
			what), Fix: "none is needed if that is meant; schedule = \"constant\" does not depend on it"})
}

// otherPrograms describes what has changed about the programs.
func (t *Trainer) otherPrograms(was map[string]string, old *loopState) []string {
	now := t.programs.Fingerprints()
	names := lists.Filter(keysOf(was, now), func(name string) bool { return was[name] != now[name] })
	// The most general cause is named alone: another plan makes all programs differ.
	switch {
	case len(was) == 0:
		return nil
	case len(names) > 0 && old.Plan != "" && old.Plan != t.programs.PlanDigest():
		return []string{"another plan"}
	case len(names) > 3:
		return []string{fmt.Sprintf("other programs (%s and %d more)", strings.Join(names[:3], ", "),
			len(names)-3)}
	case len(names) > 0:
		return []string{fmt.Sprintf("other programs (%s)", strings.Join(names, ", "))}
	case old.Options != "" && old.Options != t.programs.OptionsDigest():
		return []string{"other compile options"}
	}
	return nil
}

// otherEngine describes what has changed between two engines.
func otherEngine(was, now engine.Identity) (changes []string) {
	version := func(i engine.Identity) string {
		text := strings.TrimSpace(i.Name + " " + i.Version)
		if len(i.PJRT) > 0 {
			text += " (PJRT " + strings.Trim(strings.ReplaceAll(fmt.Sprint(i.PJRT), " ", "."), "[]") + ")"
		}
		return text
	}
	switch {
	case was.Name != now.Name, was.Version != "" && was.Version != now.Version,
		!slices.Equal(was.PJRT, now.PJRT):
		changes = append(changes, "engine "+version(was)+" → "+version(now))
	case was.Digest != "" && was.Digest != now.Digest:
		changes = append(changes, "other files of engine "+version(now))
	}
	if was.Host != "" && was.Host != now.Host {
		changes = append(changes, "another processor")
	}
	// Checkpoints without a digest are older than recorded environments.
	if was.Digest == "" {
		return changes
	}
	before, after := was.Compared(), now.Compared()
	for _, name := range keysOf(before, after) {
		if a, b := before[name], after[name]; a != b {
			changes = append(changes, fmt.Sprintf("%s %s → %s", name, cmp.Or(a, "unset"),
				cmp.Or(b, "unset")))
		}
	}
	return changes
}

// protocol is the version of the messages between processes of a run.
const protocol = 2 // 2: each process saves its own

// A fact is something that all processes of a run must have in common.
type fact struct{ name, value string }

// settled returns the facts that are known before the state is filled.
func (t *Trainer) settled() []fact {
	if t.others == nil {
		return nil
	}
	// Folders and paths may differ between hosts; everything that changes a bit may not.
	recipe := *t.opts.Recipe
	recipe.Out = ""
	engine := t.opts.Engine.Identity()
	programs := t.programs.Fingerprints() // of all ranks, whoever has them
	return []fact{
		{"recipe", recipe.String()},
		{"plan", t.programs.PlanDigest()},
		{"until", fmt.Sprint(t.end())},
		{"profile", fmt.Sprint(t.joinsSpansAfter())},
		{"model", string(t.config)},
		{"policy of precision", t.programs.Policy.String()},
		{"data", digest(t.opts.Data)},
		{"data of the validation", t.evalDigest()},
		{"programs", fmt.Sprint(programs)}, // fmt prints maps in order
		{"compile options", t.programs.OptionsDigest()},
		{"engine", fmt.Sprint(engine.Name, engine.Version, engine.PJRT, engine.Digest)},
		{"environment variables", fmt.Sprintf("%q", engine.Compared())},
		{"build of Deepwell", fmt.Sprint(t.opts.Build, protocol)},
	}
}

// begun returns the facts of the state that a run begins with.
func (t *Trainer) begun() []fact {
	return []fact{{"step", fmt.Sprint(t.step, t.updates)}, {"place in the data", fmt.Sprint(t.at)}}
}

// agree compares facts with all other processes: each receives the SHA-256 of every fact of the
// others. The error names what differs, and where.
func (p *peers) agree(ctx context.Context, facts []fact) error {
	if p == nil {
		return nil
	}
	// Digests have a fixed length, so all processes send equally many bytes.
	var mine []byte
	for _, f := range facts {
		sum := sha256.Sum256([]byte(f.value))
		mine = append(mine, sum[:]...)
	}
	all, err := p.exchange(ctx, "facts", mine)
	if err != nil {
		return err
	}
	// Each process names all that differ from itself: the person reads one log.
	var differ []string
	for n, theirs := range all {
		var names []string
		for i, f := range facts {
			at := sha256.Size * i
			if !bytes.Equal(mine[at:at+sha256.Size], theirs[at:at+sha256.Size]) {
				names = append(names, f.name)
			}
		}
		if len(names) > 0 {
			differ = append(differ, fmt.Sprintf("process %d (%s) has another %s", n, p.Addresses[n],
				strings.Join(names, ", another ")))
		}
	}
	if len(differ) == 0 {
		return nil
	}
	return diag.New(diag.PeersDiffer, "%s than this one, process %d", strings.Join(differ, "; "),
		p.Self).Try("give all processes the same files, engine, environment and binary")
}
