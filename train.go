package deepwell

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/tfevents"
	"github.com/deepwell/deepwell/internal/trace"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/tokenizer"
	"github.com/deepwell/deepwell/train"
)

// A TrainJob is what to train.
type TrainJob struct {
	Path    string   // of run.toml
	Set     []string // KEY=VALUE, on top of it
	Plan    string   // the file of a plan for several devices; "" is one device
	Until   int      // the step after which the run pauses; 0 is the last
	Profile string   // FROM:TO, the steps to trace
	Replay  string   // the folder of a rejected step to compute again, instead of training
	// Peers are the addresses of all processes of a run, in order, and Self which of them this is: the
	// ranks of a plan's pipeline are dealt to them. None is one process.
	Peers []string
	Self  int
	// Handover is a new folder for another program that is to train the same, instead of training:
	// the first weights, the batches and the settings.
	Handover string
}

// A Trained is what came of a TrainJob: how far the run is, or what a replayed step showed.
type Trained struct {
	Run    *train.Result `json:"run,omitempty"`
	Replay *train.Replay `json:"replay,omitempty"`
}

// Train follows a recipe to its last step, from the newest checkpoint of its folder on. Replaying a
// rejected step, it computes the step's gradients again and changes nothing.
func (e *Env) Train(ctx context.Context, job TrainJob) (*Trained, error) {
	v := e.begin(ctx, "train")
	r := &runner{env: e, job: job}
	defer r.close()
	done := &Trained{}
	v.pass("read the recipe", r.readRecipe)
	v.pass("find the model", r.findModel)
	v.pass("read the plan", r.readPlan)
	v.pass("read the data", func() error { return r.readData(ctx) })
	if job.Handover != "" {
		v.pass("write what another program needs", r.handOver)
		return done, v.err
	}
	v.pass("write the programs", r.writePrograms)
	v.pass("open the engine", func() error { return r.openEngine(ctx) })
	v.pass("open the run's folder", r.openFolder)
	v.pass("compile and fill the state", func() error { return r.start(ctx) })
	if job.Replay != "" {
		v.pass("replay the step", func() (err error) {
			done.Replay, err = r.trainer.Replay(ctx, job.Replay)
			return err
		})
		return done, v.err
	}
	v.pass("train", func() error { return r.trainer.Run(ctx) })
	if r.trainer != nil {
		result := r.trainer.Result()
		done.Run = &result
	}
	return done, errors.Join(v.err, r.finish())
}

// A runner is a training run while it is put together.
type runner struct {
	env     *Env
	job     TrainJob
	recipe  *recipe.Recipe
	plan    *plan.Plan // nil is one device
	model   *capture.Model
	random  bool // parameters begin at random
	tokens  *tokenizer.Tokenizer
	spelled string // the tokenizer's file
	rows    *data.Loader
	held    *data.Loader
	program *train.Programs
	engine  *engine.Engine
	// processes are those of the run; nil if there is one.
	processes *train.Processes
	events    event.Sink
	log       *event.File
	board     *tfevents.Writer
	trace     *trace.Profile
	trainer   *train.Trainer
}

func (r *runner) readRecipe() (err error) {
	text, err := os.ReadFile(r.job.Path)
	if err != nil {
		e := diag.New(diag.FileError, "cannot read the recipe").At("%s", r.job.Path).Wrap(err)
		if errors.Is(err, fs.ErrNotExist) {
			e = e.Try("deepwell train --example > %s", r.job.Path)
		}
		return e
	}
	r.recipe, err = recipe.Parse(text, r.job.Path, r.job.Set, os.Getenv)
	return err
}

// findModel finds the configuration and decides what parameters begin as.
func (r *runner) findModel() (err error) {
	if r.model, err = capture.Open(r.recipe.Model, capture.Options{}); err != nil {
		return at(err, r.job.Path+": model")
	}
	switch r.recipe.Init {
	case "random":
		r.random = true
	case "weights":
		if !r.model.HasWeights() {
			return diag.New(diag.ModelMissing, "%s has no weights to begin with", r.recipe.Model).
				At("%s: init", r.job.Path).Try(`init = "random"`)
		}
	default:
		r.random = !r.model.HasWeights()
	}
	if r.random {
		return nil
	}
	return r.model.Check()
}

// readPlan reads the plan, if there is one. The devices of the CPU engine stand in for its cluster.
func (r *runner) readPlan() (err error) {
	if r.job.Plan == "" {
		return nil
	}
	if r.plan, err = readPlan(r.job.Plan); err != nil {
		return err
	}
	// What the recipe leaves open the plan decides.
	if r.recipe.Micro == r.recipe.Batch {
		r.recipe.Micro = int(r.plan.Rows())
	}
	if len(r.recipe.Recompute) == 0 {
		r.recipe.Recompute = r.plan.Recompute
	}
	return nil
}

// readData reads the tokenizer and the tokens.
func (r *runner) readData(ctx context.Context) (err error) {
	if err := r.readTokenizer(); err != nil {
		return err
	}
	o := data.Options{Tokenizer: r.tokens, Seq: r.recipe.Seq, Seed: uint64(r.recipe.Seed),
		Shuffle: true, HoldoutShare: r.recipe.Eval.Share, Events: r.env.Events}
	if r.env.Cache != "" {
		o.Cache = filepath.Join(r.env.Cache, "tokens")
	}
	for _, s := range r.recipe.Data.Sources {
		o.Sources = append(o.Sources, data.Source{Name: s.Name, Path: s.Path, Weight: s.Weight,
			Format: data.Format(s.Format), Template: s.Template})
	}
	if r.rows, err = data.Open(ctx, o); err != nil {
		return at(err, r.job.Path+": data.sources")
	}
	if r.recipe.Eval.Path == "" {
		if r.recipe.Eval.Share > 0 {
			r.held = r.rows
		}
		return nil
	}
	o.Sources, o.Shuffle, o.HoldoutShare = []data.Source{{Path: r.recipe.Eval.Path}}, false, 0
	if r.held, err = data.Open(ctx, o); err != nil {
		return at(err, r.job.Path+": eval.data")
	}
	return nil
}

// readTokenizer finds the tokenizer of the recipe, or that of the model.
func (r *runner) readTokenizer() (err error) {
	where := r.recipe.Data.Tokenizer
	if hub := len(where) > 3 && where[:3] == "hf:"; hub {
		m, err := capture.Open(where, capture.Options{})
		if err != nil {
			return at(err, r.job.Path+": data.tokenizer")
		}
		defer func() { _ = m.Close() }()
		where = m.Tokenizer
	} else if where == "" {
		where = r.model.Tokenizer
	}
	if where == "" {
		return diag.New(diag.DataTokenizer, "no tokenizer is named, and the model brings none").
			At("%s: data.tokenizer", r.job.Path).
			Try("deepwell data tokenizer TEXT --vocab %d -o tokenizer.json, then data.tokenizer = %q",
				min(r.model.Config.Vocab, 8192), "tokenizer.json")
	}
	if r.spelled, err = tokenizer.Find(where); err == nil {
		r.tokens, err = tokenizer.Load(r.spelled)
	}
	if err != nil {
		return at(err, r.job.Path+": data.tokenizer")
	}
	if have, want := int64(r.tokens.Size()), r.model.Config.Vocab; have > want {
		return diag.New(diag.DataTokenizer, "the tokenizer has %d tokens, the model room for %d",
			have, want).At("%s: data.tokenizer", r.job.Path).
			Try("use the model's own tokenizer, or a model with vocab_size %d", have)
	}
	return nil
}

func (r *runner) writePrograms() (err error) {
	r.program, err = train.Write(r.model.Config, r.recipe, "cpu", r.plan)
	if err != nil {
		return err
	}
	for _, note := range r.program.Notes {
		r.env.Events.Emit(event.Phase{Verb: "train", Name: note})
	}
	return nil
}

func (r *runner) openEngine(ctx context.Context) (err error) {
	devices := 1
	if r.plan != nil {
		devices = int(r.plan.Devices()) / max(1, len(r.job.Peers))
	}
	r.engine, err = engine.Open(ctx, "cpu", engine.Options{Dir: r.env.Engines, Devices: devices,
		Cache: r.env.Cache, Events: r.env.Events})
	if err != nil || len(r.job.Peers) == 0 {
		return err
	}
	r.processes, err = r.listen(ctx)
	return err
}

// openFolder makes the run's folder: its events, and what an export needs beside a checkpoint.
func (r *runner) openFolder() (err error) {
	out := r.recipe.Out
	r.events = r.env.Events
	if r.job.Replay != "" || !r.processes.Leads() {
		return nil
	}
	if err := os.MkdirAll(out, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot make the run's folder").At("%s", out).Wrap(err).
			Try("give a folder that can be written: --set out=NAME")
	}
	if err := r.keepTokenizer(); err != nil {
		return diag.New(diag.FileError, "cannot keep the tokenizer in %s", out).Wrap(err)
	}
	if r.plan != nil { // for plan --calibrate
		kept := filepath.Join(out, "plan.json")
		if err := atomicfile.Write(kept, []byte(r.plan.String()), 0o666); err != nil {
			return diag.New(diag.FileError, "cannot keep the plan in %s", out).Wrap(err)
		}
	}
	if precision.IsFile(r.recipe.Narrow) { // likewise
		kept := filepath.Join(out, policyFile)
		if err := atomicfile.Write(kept, []byte(r.program.Policy.String()), 0o666); err != nil {
			return diag.New(diag.FileError, "cannot keep the policy in %s", out).Wrap(err)
		}
	}
	if r.log, err = event.Open(filepath.Join(out, "events.jsonl"), time.Now); err != nil {
		return diag.New(diag.FileError, "cannot write the run's events").At("%s", out).Wrap(err)
	}
	if r.board, err = tfevents.Create(filepath.Join(out, "tensorboard"), time.Now); err != nil {
		return diag.New(diag.FileError, "cannot write for TensorBoard").At("%s", out).Wrap(err)
	}
	r.events = event.Tee(r.env.Events, r.log, r.board)
	if r.job.Profile == "" {
		return nil
	}
	r.trace, err = trace.Create(filepath.Join(out, "profile.json"), r.job.Profile, r.events,
		time.Now)
	if err == nil {
		r.events = event.Tee(r.events, r.trace)
	}
	return err
}

// keepTokenizer copies the tokenizer, and what says which of its tokens end a text, into the run's
// folder.
func (r *runner) keepTokenizer() error {
	dir, base := filepath.Split(r.spelled)
	for _, name := range []string{base, "tokenizer_config.json", "special_tokens_map.json"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) && name != base {
			continue
		}
		if err == nil {
			err = atomicfile.Write(filepath.Join(r.recipe.Out, name), text, 0o666)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) start(ctx context.Context) (err error) {
	o := train.Options{Engine: r.engine, Config: r.model.Config, Recipe: r.recipe,
		Programs: r.program, Data: r.rows, Init: r.init, Events: r.events, Now: time.Now,
		Until: r.job.Until, Processes: r.processes}
	if r.held != nil {
		o.Eval = r.held
	}
	if r.trace != nil {
		o.Spans = r.trace
	}
	r.trainer, err = train.New(ctx, o)
	return err
}

func (r *runner) init(p *model.Param, dst []float32) error {
	if r.random {
		return model.Init(r.model.Config, p, uint64(r.recipe.Seed), dst)
	}
	return r.model.Read(p, dst)
}

// finish closes what the run wrote, and tells what went wrong with it.
func (r *runner) finish() error {
	var errs []error
	if r.trace != nil {
		errs = append(errs, r.trace.Close())
	}
	if r.board != nil {
		errs = append(errs, r.board.Close())
	}
	if r.log != nil {
		errs = append(errs, r.log.Close())
	}
	return errors.Join(errs...)
}

func (r *runner) close() {
	if r.trainer != nil {
		r.trainer.Close()
	}
	if r.processes != nil {
		_ = r.processes.Hub.Close()
	}
	if r.engine != nil {
		r.engine.Close()
	}
	if r.held != nil && r.held != r.rows {
		_ = r.held.Close()
	}
	if r.rows != nil {
		_ = r.rows.Close()
	}
	if r.model != nil {
		_ = r.model.Close()
	}
}
