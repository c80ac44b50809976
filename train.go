package deepwell

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/flock"
	"github.com/deepwell/deepwell/internal/room"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/internal/tfevents"
	"github.com/deepwell/deepwell/internal/trace"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/tokenizer"
	"github.com/deepwell/deepwell/train"
)

// A TrainJob is a training run as run.toml and the command line describe it.
type TrainJob struct {
	Path string   // of run.toml
	Set  []string // KEY=VALUE, on top of it
	Plan string   // the file of a plan for several devices; "" is one device
	// Device is [DeviceCPU], [DeviceGPU], or "": GPUs where the host has them.
	Device string
	Until  int // the step after which the run pauses; 0 is the last
	// Profile is the first and the last step to trace, counted from 1; zero traces nothing.
	Profile [2]int
	Rerun   string // the folder of a rejected step to recompute, instead of training
	// Peers are the addresses of all processes of a run, in order, and Self is the index of this one:
	// pipeline ranks are assigned to them in order. Empty is one process.
	Peers []string
	Self  int
	// KeyFile has the secret that all processes share; it is optional on one host.
	KeyFile string
	// Patience is how long another process may be silent before it counts as lost; 0 means 8 s. At the
	// start, processes wait thirty times as long for each other.
	Patience time.Duration
	// Stdin has the batches of a recipe whose data.sources are ["-"]; nil refuses such a recipe.
	Stdin io.Reader `json:"-"`
	// OnStall is called if a run has stalled and does not end within seconds, being stuck where
	// nothing can be canceled. A command exits there.
	OnStall func(error) `json:"-"`
	// ReferenceRun is a new folder for initial weights, batches and settings, from which another
	// program (PyTorch) trains the same run. Nothing is trained.
	ReferenceRun string
}

// A TrainResult is the outcome of a TrainJob: the progress of the run, or the gradients of a rerun
// step.
type TrainResult struct {
	// Weights are the parameters that this process began with; nil if it did not come so far.
	Weights *event.Weights `json:"weights,omitempty"`

	Run   *train.Result      `json:"run,omitempty"`
	Rerun *train.RerunResult `json:"rerun,omitempty"`
}

// Train trains a recipe to its last step, resuming from the newest checkpoint in its folder. With
// TrainJob.Rerun it recomputes the gradients of a rejected step instead, and changes nothing.
func (e *Env) Train(ctx context.Context, job TrainJob) (*TrainResult, error) {
	v := e.begin(ctx, "train")
	r := &runner{env: e, job: job}
	var closed atomic.Bool
	defer closed.Store(true) // after r.close, which frees what a stalled run may still use
	if job.OnStall != nil {
		r.job.OnStall = func(err error) {
			if !closed.Load() {
				r.hangUp()
				job.OnStall(err)
			}
		}
	}
	defer r.close()
	done := &TrainResult{}
	v.pass("read the recipe", r.readRecipe)
	v.pass("find the model", r.findModelOrCheckpoint)
	v.pass("read the plan", r.readPlan)
	v.pass("find the devices", func() error { return r.findDevices(ctx) })
	v.pass("read the data", func() error {
		if err := r.readData(ctx); err != nil || r.rows == nil {
			return err
		}
		if kinds := r.rowKinds(); kinds != "" {
			e.Events.Emit(event.Note{Text: kinds})
		}
		return nil
	})
	if job.ReferenceRun != "" {
		v.pass("write the reference run", func() error { return r.writeReferenceRun(ctx) })
		return done, v.err
	}
	v.pass("write the programs", r.writePrograms)
	v.pass("check the memory", r.checkMemory)
	v.pass("open the engine", func() error { return r.openEngine(ctx) })
	v.pass("open the run's folder", r.openFolder)
	v.pass("compile and fill the state", func() error { return r.start(ctx) })
	v.pass("keep what the run is made of", r.keepInputs)
	if job.Rerun != "" {
		done.Rerun = get(v, "rerun the step", func() (*train.RerunResult, error) {
			return r.trainer.Rerun(ctx, job.Rerun)
		})
		return done, v.err
	}
	done.Weights = r.weights
	v.pass("train", func() error { return r.run(ctx) })
	if r.trainer != nil {
		result := r.trainer.Result()
		done.Run = &result
	}
	return done, errors.Join(r.gpuFailed(v.err), r.finish())
}

// A runner assembles a training run, pass by pass.
type runner struct {
	env           *Env
	job           TrainJob
	recipe        *recipe.Recipe
	plan          *plan.Plan // nil is one device
	devices       devices
	model         *capture.Model
	random        bool  // parameters begin at random
	noWeights     error // why the weights that the recipe names cannot be read
	weights       *event.Weights
	tokens        *tokenizer.Tokenizer
	tokenizerFile string
	rows          *data.Loader // nil if batches come from a stream
	stream        *data.Stream
	held          *data.Loader
	program       *step.Programs
	engine        *engine.Engine
	// processes are all processes of the run; nil for one process.
	processes *train.Processes
	store     *link.Store // of a client that processes share
	events    event.Sink
	warnings  *warnings   // of what is opened before the run's folder
	lock      *flock.Lock // of the run's folder; nil if another process has it
	log       *event.File
	board     *tfevents.Writer
	trace     *trace.Profile
	trainer   *train.Trainer
	wasRun    bool // a run has used the folder before
	failed    bool // a GPU has: nothing on it can be freed
	// refused are kernels of our own that differ on a GPU of the run from their plain form.
	refused []string
}

func (r *runner) readRecipe() (err error) {
	text, err := safedir.ReadPlain(r.job.Path, maxText)
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

// findModel finds the model's configuration and decides where parameters come from. Files that look
// like weights are never ignored in favour of random parameters unless the recipe says init =
// "random".
func (r *runner) findModel() (err error) {
	if r.model, err = r.openModel(); err != nil {
		return at(err, r.job.Path+": model")
	}
	r.random = r.recipe.Init == "random" || r.recipe.Init == "" && !r.model.HasWeights()
	lack := r.model.Lack()
	switch {
	case r.recipe.Init == "random" || r.model.HasWeights():
	case lack != nil && r.recipe.Init == "":
		e := diag.From(lack)
		r.noWeights = e.Try("%s; or begin from random weights: init = %q", e.Fix, "random")
	case lack != nil:
		r.noWeights = lack
	case r.recipe.Init == "weights":
		r.noWeights = diag.New(diag.ModelMissing, "%s has no weights to begin with", r.recipe.Model).
			At("%s: init", r.job.Path).
			Try("give a model with weights: model = FOLDER; or init = %q", "random")
	}
	if r.noWeights != nil || r.random {
		return r.noWeights
	}
	return r.model.Check()
}

// openModel opens the model. A run that has begun has a copy of the program that it was captured
// from, for when the file is gone.
func (r *runner) openModel() (*capture.Model, error) {
	m, err := capture.Open(r.recipe.Model, capture.Options{})
	kept := filepath.Join(r.recipe.Out, capture.ProgramName)
	if err != nil && filepath.Ext(r.recipe.Model) == filepath.Ext(kept) && r.begun() {
		if _, gone := os.Stat(r.recipe.Model); errors.Is(gone, fs.ErrNotExist) {
			return capture.Open(kept, capture.Options{})
		}
	}
	if err != nil || m.Program == nil {
		return m, err
	}
	if r.begun() {
		err = m.Program.Began(r.recipe.Out)
	}
	if r.recipe.Init == "random" {
		err = diag.New(diag.NotSupported, "a program begins with its own weights, not at random").
			Because("how a module is initialized is not part of what torch.export saves").
			Try("initialize the module in Python, export it again, and leave init out")
	}
	if err != nil {
		_ = m.Close()
		return nil, err
	}
	return m, nil
}

// findModelOrCheckpoint is findModel for a run that may have checkpoints: it resumes from the
// newest, and the weights that it began with are not needed any more.
func (r *runner) findModelOrCheckpoint() error {
	err := r.findModel()
	if r.noWeights != nil && r.begun() {
		return nil
	}
	return err
}

// begun reports whether the run has checkpoints to resume from.
func (r *runner) begun() bool {
	steps, err := ckpt.List(filepath.Join(r.recipe.Out, "checkpoints"))
	return err == nil && len(steps) > 0
}

// readPlan reads the plan, if there is one.
func (r *runner) readPlan() (err error) {
	if r.job.Plan == "" {
		return nil
	}
	p, keys, err := readPlanKeys(r.job.Plan)
	if err != nil {
		return err
	}
	r.plan = p
	// A plan without types and precision takes the recipe's. If the recipe has a policy file, the
	// plan must name its narrowest format, as always.
	if _, named := keys["precision"]; !named && keys["types"] == nil {
		p.Types.Params = r.recipe.Precision
		if !precision.IsFile(r.recipe.GEMMs) {
			p.Precision = r.recipe.GEMMs
		}
	}
	// What the recipe leaves open the plan decides.
	if r.recipe.Microbatch == r.recipe.Batch {
		r.recipe.Microbatch = int(r.plan.MicrobatchSequences())
	}
	if len(r.recipe.Recompute) == 0 {
		r.recipe.Recompute = r.plan.Recompute
	}
	return nil
}

// readData opens the tokenizer, the training data and the validation data.
func (r *runner) readData(ctx context.Context) (err error) {
	streams := r.recipe.Data.Streams()
	// Batches have tokens already: a tokenizer is for the export, if there is one.
	named := cmp.Or(r.recipe.Data.Tokenizer, r.model.Tokenizer) != ""
	if !streams || named || r.recipe.Eval.Path != "" {
		if err := r.readTokenizer(); err != nil {
			return err
		}
	}
	if streams {
		if err := r.openStream(ctx); err != nil || r.recipe.Eval.Path == "" {
			return err
		}
	}
	o := data.Options{Tokenizer: r.tokens, Seq: r.recipe.Seq, Seed: uint64(r.recipe.Seed),
		Shuffle: true, HoldoutShare: r.recipe.Eval.Share, Events: r.early(),
		Document: int64(r.recipe.Data.DocumentMiB) << 20}
	if r.tokenizerFile != "" {
		o.ModelDir = filepath.Dir(r.tokenizerFile)
	}
	if r.env.Cache != "" {
		o.Cache = filepath.Join(r.env.Cache, "tokens")
	}
	for _, s := range r.recipe.Data.Sources {
		o.Sources = append(o.Sources, data.Source{Name: s.Name, Path: s.Path, Weight: s.Weight,
			Format: data.Format(s.Format), Template: s.Template, Columns: s.Columns})
	}
	if !streams {
		if r.rows, err = data.Open(ctx, o); err != nil {
			return at(err, r.job.Path+": data.sources")
		}
		if err = r.recipe.SetSteps(r.rows.Sequences()); err != nil {
			return at(err, r.job.Path+": "+diag.From(err).Where)
		}
	}
	if r.recipe.Eval.Path == "" {
		if r.recipe.Eval.Share > 0 {
			r.held = r.rows
		}
		return nil
	}
	// Validation rows are written as the training rows are, where those agree.
	first := o.Sources[0]
	held := data.Source{Path: r.recipe.Eval.Path, Template: first.Template, Columns: first.Columns}
	for _, s := range o.Sources {
		if !maps.Equal(s.Columns, held.Columns) {
			held.Columns = nil
		}
		held.Template = cmp.Or(held.Template, s.Template)
	}
	o.Sources, o.Shuffle, o.HoldoutShare = []data.Source{held}, false, 0
	if r.held, err = data.Open(ctx, o); err != nil {
		return at(err, r.job.Path+": eval.data")
	}
	return nil
}

// openStream takes the training data from standard input.
func (r *runner) openStream(ctx context.Context) (err error) {
	switch {
	case r.job.Stdin == nil:
		err = diag.New(diag.BadInput, "only deepwell train takes batches from standard input")
	case len(r.job.Peers) > 1:
		err = diag.New(diag.NotSupported, "batches from standard input are for one process, and the run"+
			" has %d", len(r.job.Peers)).Try("give files: data.sources = [\"PATH\"]")
	default:
		r.stream, err = data.NewStream(ctx, r.job.Stdin, r.recipe.Batch, r.recipe.Seq)
	}
	if err != nil {
		return at(err, r.job.Path+": data.sources")
	}
	return nil
}

// dataset is where batches come from.
func (r *runner) dataset() interface {
	train.Dataset
	train.DocumentCounter
} {
	if r.stream != nil {
		return r.stream
	}
	return r.rows
}

// readTokenizer finds the recipe's tokenizer, or the model's.
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
				min(r.model.Trained().Facts().Vocab, 8192), "tokenizer.json")
	}
	if r.tokenizerFile, err = tokenizer.Find(where); err == nil {
		r.tokens, err = tokenizer.Load(r.tokenizerFile)
	}
	if err != nil {
		return at(err, r.job.Path+": data.tokenizer")
	}
	if have, want := int64(r.tokens.Size()), r.model.Trained().Facts().Vocab; have > want {
		return diag.New(diag.DataTokenizer, "the tokenizer has %d tokens, the model room for %d",
			have, want).At("%s: data.tokenizer", r.job.Path).
			Try("use the model's own tokenizer, or a model with vocab_size %d", have)
	}
	return nil
}

func (r *runner) writePrograms() (err error) {
	if c := r.model.Config; c != nil && int64(r.recipe.Seq) > c.Context && !c.Learned &&
		r.model.Program == nil {
		// Learned positions end there, and are refused; rotary ones go on, untrained.
		r.env.Events.Emit(event.Warning{Text: fmt.Sprintf(
			"seq = %d is beyond the %d positions that the model was made for", r.recipe.Seq, c.Context),
			Fix: fmt.Sprintf("seq = %d, or a config.json with scaled rotary positions", c.Context)})
	}
	r.program, err = step.Build(step.Spec{Model: r.model.Trained(), Recipe: r.recipe,
		Arch: r.devices.arch(), Plan: r.plan, Documents: r.documents(),
		Kernels: kernels.Options{Refused: r.refused}})
	if err != nil {
		return err
	}
	for _, note := range r.program.Notes {
		r.env.Events.Emit(event.Phase{Verb: "train", Name: note})
	}
	return nil
}

// documents is how many documents a sequence of the data has at most.
func (r *runner) documents() int64 {
	if r.held == nil {
		return r.dataset().Documents()
	}
	return max(r.dataset().Documents(), r.held.Documents())
}

// warnings forwards events, and brings warnings and kernels that are not used into a log that is
// opened later.
type warnings struct {
	event.Sink
	mu   sync.Mutex
	log  event.Sink // nil until it is open
	kept []event.Event
}

// early is the sink of events before the run's folder is open.
func (r *runner) early() event.Sink {
	if r.warnings == nil {
		r.warnings = &warnings{Sink: r.env.Events}
	}
	return r.warnings
}

// Emit implements event.Sink.
func (w *warnings) Emit(e event.Event) {
	w.Sink.Emit(e)
	switch e.(type) {
	case event.Warning, event.KernelDiffers:
	default:
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.log == nil {
		w.kept = append(w.kept, e)
	} else {
		w.log.Emit(e)
	}
}

// into writes the collected warnings into the log, and all that follow.
func (w *warnings) into(log event.Sink) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = log
	for _, e := range w.kept {
		log.Emit(e)
	}
	w.kept = nil
}

// openFolder makes and locks the run's folder, checks its disk, and opens the logs.
func (r *runner) openFolder() (err error) {
	out := r.recipe.Out
	r.events = r.env.Events
	if r.job.Rerun != "" {
		return nil
	}
	if !r.processes.Leads() {
		return r.profile("")
	}
	if err := os.MkdirAll(out, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot make the run's folder").At("%s", out).Wrap(err).
			Try("give a folder that can be written: --set out=NAME")
	}
	if err := r.lockFolder(); err != nil {
		return err
	}
	if err := train.FitsDisk(r.program, train.DiskCheck{Recipe: r.recipe, Until: r.job.Until,
		Free: room.Disk, Events: r.env.Events}); err != nil {
		return err
	}
	log := filepath.Join(out, "events.jsonl")
	if _, err := os.Lstat(log); err == nil {
		r.wasRun = true
	}
	r.log, err = event.Open(log, time.Now)
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e
	} else if err != nil {
		return diag.New(diag.FileError, "cannot write the run's events").At("%s", out).Wrap(err)
	}
	if r.board, err = tfevents.Create(filepath.Join(out, "tensorboard"), time.Now); err != nil {
		return diag.New(diag.FileError, "cannot write for TensorBoard").At("%s", out).Wrap(err)
	}
	r.events = event.Tee(r.env.Events, r.log, r.board)
	r.warnings.into(r.log)
	r.warnUnlocked()
	return r.profile(filepath.Join(out, "profile.json"))
}

// profile begins the profile that was asked for. path is "" in a process that does not lead.
func (r *runner) profile(path string) (err error) {
	steps := r.job.Profile
	if steps == [2]int{} {
		return nil
	}
	o := trace.Options{Path: path, From: steps[0], To: steps[1], Events: r.events, Now: time.Now,
		Record: r.engine.Record}
	identity := r.engine.Identity()
	o.About = append(o.About, trace.Arg{Name: "engine", Value: identity.Name + " " + identity.Version})
	about := maps.Clone(identity.Environment)
	if r.devices.gpus != nil {
		about = r.engine.Versions() // CUDA's, cuDNN's, NCCL's
		maps.Copy(about, identity.Environment)
	}
	for _, name := range slices.Sorted(maps.Keys(about)) {
		o.About = append(o.About, trace.Arg{Name: name, Value: about[name]})
	}
	if r.trace, err = trace.Create(o); err == nil {
		r.events = event.Tee(r.events, r.trace)
	}
	return err
}

// lockFolder locks the run's folder for the life of the process: two runs in one folder would mix
// their checkpoints and events.
func (r *runner) lockFolder() (err error) {
	r.lock, err = flock.Run(r.recipe.Out)
	switch {
	case errors.Is(err, diag.RunBusy):
		return diag.From(err).At("%s: out", r.job.Path).
			Try("wait for it, stop it, or give this run a folder of its own: --set out=NAME")
	case errors.Is(err, diag.FileError):
		return diag.From(err).Try("give a folder that can be written: --set out=NAME")
	}
	return err
}

// warnUnlocked warns of a file system on which locks have no effect.
func (r *runner) warnUnlocked() {
	if r.lock.Firm() {
		return
	}
	r.events.Emit(event.Warning{Code: string(diag.RunBusy), Text: flock.Loose(r.recipe.Out),
		Fix: "start the run only once, or put it on another disk: --set out=NAME"})
}

// keepInputs copies what an export and a calibration need into the run's folder. It runs after the
// checkpoint was found to belong to this run, so files of another run are not replaced.
func (r *runner) keepInputs() error {
	out := r.recipe.Out
	if r.job.Rerun != "" || !r.processes.Leads() {
		return nil
	}
	if err := r.keepTokenizer(); err != nil {
		return diag.New(diag.FileError, "cannot keep the tokenizer in %s", out).Wrap(err)
	}
	if r.plan != nil { // for plan --calibrate
		if err := r.keep("plan.json", []byte(r.plan.String())); err != nil {
			return err
		}
	}
	if precision.IsFile(r.recipe.GEMMs) { // likewise
		if err := r.keep(policyFile, []byte(r.program.Policy.String())); err != nil {
			return err
		}
	}
	return nil
}

// maxTokenizer bounds a tokenizer file; the largest known one has 34 MB.
const maxTokenizer = 256 << 20

// keep writes a copy of an input into the run's folder. A file of the same name in a folder that no
// run has used belongs to the user and is not replaced.
func (r *runner) keep(name string, text []byte) error {
	path := filepath.Join(r.recipe.Out, name)
	have, err := safedir.ReadPlain(path, maxTokenizer) // a pipe there must not stop the run
	if !r.wasRun && !errors.Is(err, fs.ErrNotExist) && (err != nil || !bytes.Equal(have, text)) {
		return diag.New(diag.FolderForeign, "the folder holds another %s, which no run wrote", name).
			At("%s", r.recipe.Out).Try("give the run a folder of its own: --set out=NAME")
	}
	if err := atomicfile.Write(path, text, 0o666); err != nil {
		return diag.New(diag.FileError, "cannot keep %s in the run's folder", name).
			At("%s", r.recipe.Out).Wrap(err)
	}
	return nil
}

// keepTokenizer copies the tokenizer and its configuration into the run's folder.
func (r *runner) keepTokenizer() error {
	if r.tokenizerFile == "" { // batches have tokens already
		return r.keepSource("")
	}
	dir, base := filepath.Split(r.tokenizerFile)
	for _, name := range []string{base, "tokenizer_config.json", "special_tokens_map.json"} {
		text, err := safedir.ReadPlain(filepath.Join(dir, name), maxTokenizer)
		if errors.Is(err, fs.ErrNotExist) && name != base {
			continue
		}
		if err == nil {
			err = r.keep(name, text)
		}
		if err != nil {
			return err
		}
	}
	return r.keepSource(cmp.Or(dir, "."))
}

// keepSource copies what an export has beside the weights: files beside the tokenizer, if there is
// a folder of one, and the model's own.
func (r *runner) keepSource(dir string) error {
	err := r.model.KeepSource(r.recipe.Out)
	if err != nil && r.model.Program != nil {
		return err // without it the run can be neither resumed nor exported
	}
	if dir != "" {
		err = errors.Join(capture.Accompany(r.recipe.Out, dir), err)
	}
	if err != nil { // the run needs none of it; an export will
		e := diag.From(err)
		r.env.Events.Emit(event.Warning{Code: string(e.Code),
			Text: "an export will lack a file of the model: " + e.What, Fix: e.Fix})
	}
	return nil
}

// start compiles the programs and fills the state.
func (r *runner) start(ctx context.Context) (err error) {
	o := train.Options{Engine: r.engine, Model: r.model.Trained(), Recipe: r.recipe,
		Programs: r.program, Data: r.dataset(), Init: r.init, Events: r.events, Until: r.job.Until,
		Processes: r.processes, Build: build(), OnStall: r.job.OnStall, Locked: true,
		Peak: r.devices.peak(1)}
	if r.plan != nil {
		o.Peak = r.devices.peak(r.plan.Devices())
	}
	if r.held != nil {
		o.Eval = r.held
	}
	if r.trace != nil {
		o.Spans = r.trace
	}
	if r.job.Rerun == "" && r.processes.Leads() {
		r.events.Emit(r.describe())
	}
	if r.job.Rerun == "" && !r.begun() {
		r.report(r.first()) // a person need not wait for the compiler to learn it
	}
	if r.trainer, err = train.New(ctx, o); err != nil || r.weights != nil || r.job.Rerun != "" {
		return err
	}
	result := r.trainer.Result()
	r.report(event.Weights{From: event.FromCheckpoint, Path: result.Checkpoints, Step: result.Step,
		Seed: r.recipe.Seed})
	return nil
}

// first describes the weights of a run without a checkpoint.
func (r *runner) first() event.Weights {
	w := event.Weights{From: event.FromRandom, Seed: r.recipe.Seed}
	if c := r.model.Contents(); !r.random && c != nil {
		w.From, w.Path, w.Tensors, w.Bytes = event.FromFiles, r.recipe.Model, c.Tensors, c.Bytes
		w.DType = c.DType()
	}
	return w
}

// report emits where the weights come from.
func (r *runner) report(w event.Weights) {
	r.weights = &w
	r.events.Emit(w)
}

// build names this binary: the version of its module, and the commit where it is known.
func build() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	name, dirty := info.Main.Version, ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			name += " " + s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ", modified"
		}
	}
	return name + dirty
}

// init fills one parameter of a run without a checkpoint.
func (r *runner) init(p *model.Param, dst []float32) error {
	switch {
	case r.noWeights != nil:
		return r.noWeights
	case r.random:
		return r.model.Config.Init(p, uint64(r.recipe.Seed), dst)
	}
	return r.model.Read(p, dst)
}

// finish closes the run's logs, and returns what went wrong with them.
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

// hangUp tells the other processes why this one ends, in bounded time.
func (r *runner) hangUp() {
	if r.processes == nil {
		return
	}
	done := make(chan struct{})
	go func() {
		_ = r.processes.Hub.Close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Second):
	}
}

// close frees everything, the folder's lock last.
func (r *runner) close() {
	if r.lock != nil {
		defer r.lock.Release() // last: nothing is written any more
	}
	if r.failed {
		r.hangUp()
		return
	}
	if r.trainer != nil {
		r.trainer.Close()
	}
	if r.store != nil {
		r.store.Close()
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
	if r.stream != nil {
		r.stream.Close()
	}
	if r.model != nil {
		_ = r.model.Close()
	}
}
