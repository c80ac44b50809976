package train

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"slices"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/room"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// A Dataset gives a run its training batches; a [data.Loader] is one, and [data.NewBatch] builds a
// batch from token slices.
//
// A Dataset is a function of the position: the same position gives the same batch, so a resumed run
// sees the sequences that it would have seen. The trainer calls Take from a goroutine of its own, a
// batch ahead of the devices, and never twice at the same time.
//
// A Dataset may also be a [Digester], a [DocumentCounter], a [ReadyChecker] and an [Adopter].
type Dataset interface {
	// Take returns the next sequences after a position, and the position behind them. A position
	// without entries, or nil, is the beginning. rank and ranks select the share of one data-parallel
	// reader; the trainer reads whole batches and passes 0, 1.
	//
	// Behind its last sequence a Dataset begins again, or gives an error of the code [diag.DataEnd],
	// which ends the run. Any other error, io.EOF included,
	// fails the step; the next step calls Take again with the same position. Without an error the
	// batch is not nil and has all sequences, and belongs to the trainer. Take must neither change
	// nor keep the map at. The returned position is not nil. If ctx ends, nobody wants the batch
	// anymore: [Trainer.Close] and [Trainer.Load] cancel it and wait until Take has returned.
	Take(ctx context.Context, at data.Position, sequences, rank, ranks int) (*data.Batch,
		data.Position, error)
}

// A Digester is a [Dataset] or an [EvalSource] whose digest names everything that decides which
// sequences come in which order. Checkpoints record the digest, and a run does not resume from one
// with another digest. Without the method, nobody notices that the data has changed.
type Digester interface {
	Digest() string
}

// A DocumentCounter is a [Dataset] or an [EvalSource] that knows how many documents its sequences
// pack at most, for the tables that attention has of them on GPUs. Without the method they have
// room for 64, and a batch with more is refused.
type DocumentCounter interface {
	Documents() int64
}

// A ReadyChecker is a [Dataset] that can be unfit for a new run although it can continue an old
// one. [New] calls Ready if there is no checkpoint to resume from, before anything is compiled, and
// returns its error.
type ReadyChecker interface {
	Ready() error
}

// An Adopter is a [Dataset] that can take on the digest of a checkpoint: data that an older version
// split in another way continues with that split. Adopt reports whether the Dataset now has the
// digest. It is called instead of Digest when a run resumes.
type Adopter interface {
	Adopt(digest string) bool
}

// An EvalSource gives the sequences of the validation loss; a [data.Loader] is one.
type EvalSource interface {
	// EvalSequences is the number of validation sequences; the first [MaxEvalSequences] of them are
	// used.
	EvalSequences() int64
	// Eval returns sequences from first on, never fewer. Behind the last one, labels are
	// [data.Ignored]. Errors and ctx are as in Dataset.Take.
	Eval(ctx context.Context, first int64, sequences, rank, ranks int) (*data.Batch, error)
}

// Spans records what a step spends its time on. The trainer calls Begin when a part of a step
// starts, and the returned function when it ends. In a run of several processes, all of which then
// need one, Spans that have the methods of a spanJoiner are joined in the first process.
type Spans interface {
	Begin(step int, name string) (end func())
}

// A spanJoiner takes the spans of all processes after its last step.
type spanJoiner interface {
	Last() int
	Mine() ([]byte, error)
	Join(process int, spans []byte) error
}

// Options describe a run. Engine, and either Model and Recipe or Programs, are required; Data is
// required by [Trainer.Step] and [Trainer.Run]. The zero value of every other field is a sensible
// default. The trainer copies the recipe and only reads the model, the plan and the programs:
// several trainers may share them, and nobody may change them before the trainers are closed.
type Options struct {
	// Engine runs the programs. It stays open until the Trainer is closed. Several trainers may share
	// one engine, and its memory.
	Engine *engine.Engine
	// Model is what to train: a [model.Config], or a model of one's own. nil takes the model that
	// Programs were built from.
	Model model.Model
	// Recipe has sizes, optimizer, saves and guards; [recipe.Default] is a start. Its model and data
	// sections are not read here. nil takes the recipe that Programs were built from.
	Recipe *recipe.Recipe
	// Plan distributes the run over the engine's devices; nil is one device. It is not read where
	// Programs are given.
	Plan *plan.Plan
	// Programs are the programs of a step, which New compiles; nil builds them from Model, Recipe and
	// Plan. Model and Recipe, if given too, must be what they were built from.
	Programs *step.Programs

	Data Dataset    // nil is for Gradients, Update, Eval and Save alone
	Eval EvalSource // nil turns validation off
	// Init fills one parameter of a run that does not resume from a checkpoint: one layer of a stack,
	// and of a layer's experts those that a device has ([model.Param.SliceExperts]). nil asks the
	// model, if it has the method Init of [model.Config], with the recipe's seed; a new run needs one
	// of them.
	Init func(p *model.Param, dst []float32) error

	// Locked says that the caller has locked the folder Recipe.Out, or only reads from it. Else New
	// locks it, so that no second run writes into it.
	Locked bool

	// Processes spreads the pipeline ranks over several processes; nil is one process.
	Processes *Processes
	// Ahead is how many actions a pipeline rank may queue on its devices ([pipeline.Config]).
	Ahead int

	// Monitor sets when the precision monitor compares and inspects; nil is [monitor.Defaults], with
	// the recipe's warmup as settling time.
	Monitor *monitor.Options

	// Build names this build of Deepwell, which must be the same in all processes of a run. "" is
	// unknown.
	Build string

	// Memory reads the memory limits of this process; nil reads the system's.
	Memory func() []machine.MemoryLimit
	// Disk reads the free bytes of a folder's disk; nil asks the system.
	Disk func(dir string) (int64, error)
	// Sleep waits before a failed save is retried; nil is time.Sleep.
	Sleep func(time.Duration)

	// Until is the step after which the run pauses; 0 is the recipe's last step. Run saves there, and
	// Step returns io.EOF.
	Until int
	// Peak is the peak arithmetic rate of all devices in FLOP/s, for MFU; 0 if it is not known.
	Peak   float64
	Events event.Sink  // nil discards events
	Now    event.Clock // nil is time.Now
	Spans  Spans       // nil records no spans

	// LeastStall is the shortest time after which a step counts as stalled, whatever guard.stall
	// says; 0 is a minute. Other phases of a run are given a multiple of it.
	LeastStall time.Duration
	// OnStall, if set, is called some seconds after Run found that it has stalled. By then
	// everything that can be canceled has been, and Run has returned unless it is stuck inside the
	// engine or a file system: a command exits here.
	OnStall func(error)
}

// An initializer is a model that knows how its parameters begin; [model.Config] is one.
type initializer interface {
	Init(p *model.Param, seed uint64, dst []float32) error
}

// complete fills in defaults and checks that the options describe a run. The caller's recipe is
// copied, not changed.
func (o Options) complete() (Options, error) {
	if o.Programs != nil {
		spec := o.Programs.Spec()
		if o.Model == nil {
			o.Model = spec.Model
		}
		if o.Recipe == nil {
			o.Recipe = spec.Recipe
		}
	}
	for _, one := range []struct {
		name  string
		given bool
	}{{"Engine", o.Engine != nil}, {"Model", !isNil(o.Model)}, {"Recipe", o.Recipe != nil}} {
		if !one.given {
			return o, diag.New(diag.BadInput, "train.Options.%s is not set", one.name)
		}
	}
	o.Recipe = completeRecipe(*o.Recipe)
	if err := o.Recipe.Check(); err != nil {
		return o, diag.From(err).At("train.Options.Recipe")
	}
	if o.Programs != nil {
		if err := o.sameProgram(); err != nil {
			return o, err
		}
	}
	if init, ok := o.Model.(initializer); o.Init == nil && ok {
		seed := uint64(o.Recipe.Seed)
		o.Init = func(p *model.Param, dst []float32) error { return init.Init(p, seed, dst) }
	}
	if o.Events == nil {
		o.Events = event.Discard
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Memory == nil {
		o.Memory = HostMemory
	}
	if o.Disk == nil {
		o.Disk = room.Disk
	}
	if o.Sleep == nil {
		o.Sleep = time.Sleep
	}
	if o.Programs != nil {
		return o, nil
	}
	var err error
	o.Programs, err = step.Build(step.Spec{Model: o.Model, Recipe: o.Recipe, Arch: o.Engine.Arch(),
		Plan: o.Plan, Documents: o.documents()})
	return o, err
}

// unknownDocuments is how many documents a sequence may have if the data does not say: three calls
// of attention on GPUs.
const unknownDocuments = 64

// documents is how many documents a sequence has at most, or may have if the data does not say.
func (o *Options) documents() (most int64) {
	for _, source := range []any{o.Data, o.Eval} {
		switch counted, ok := source.(DocumentCounter); {
		case ok:
			most = max(most, counted.Documents())
		case source != nil && (o.Plan == nil || o.Plan.Documents == 0):
			return unknownDocuments
		}
	}
	return most
}

// isNil reports whether there is no model, also as a nil pointer.
func isNil(m model.Model) bool {
	v := reflect.ValueOf(m)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// sameProgram returns an error if the model or the recipe is not what Programs were built from, as
// far as programs depend on them: they would run with other sizes than the run counts.
func (o *Options) sameProgram() error {
	spec := o.Programs.Spec()
	built := completeRecipe(*spec.Recipe)
	sizes := func(m model.Model) (list []string) {
		for _, p := range m.Params() {
			list = append(list, fmt.Sprint(p.Name, p.Size()))
		}
		return list
	}
	a, b := built.Optimizer, o.Recipe.Optimizer
	for _, one := range []struct {
		name string
		same bool
	}{
		{"Model", reflect.DeepEqual(spec.Model.Facts(), o.Model.Facts()) &&
			slices.Equal(sizes(spec.Model), sizes(o.Model))},
		{"Recipe.Batch", built.Batch == o.Recipe.Batch},
		{"Recipe.Microbatch", built.Microbatch == o.Recipe.Microbatch},
		{"Recipe.Seq", built.Seq == o.Recipe.Seq},
		{"Recipe.Precision", built.Precision == o.Recipe.Precision},
		{"Recipe.Optimizer", a.Name == b.Name && a.Beta1 == b.Beta1 && a.Beta2 == b.Beta2 &&
			a.WeightDecay == b.WeightDecay && a.MaxGradNorm == b.MaxGradNorm && a.Moments == b.Moments},
	} {
		if !one.same {
			return diag.New(diag.BadInput, "%s is not what the programs were built from", one.name).
				At("train.Options.Programs").Try("build the programs again, or leave them out")
		}
	}
	return nil
}

// completeRecipe copies a recipe and fills in what one in code may leave open, as parsing run.toml
// does.
func completeRecipe(r recipe.Recipe) *recipe.Recipe {
	if r.Microbatch == 0 {
		r.Microbatch = r.Batch
	}
	r.Optimizer.Warmup = min(r.Optimizer.Warmup, r.Steps)
	if r.Optimizer.Schedule == "constant" {
		r.Optimizer.MinLR = r.Optimizer.LR
	}
	r.Optimizer.MinLR = r.Optimizer.FinalLR()
	r.Recompute = slices.Clone(r.Recompute)
	return &r
}

// HostMemory reads the limits that bound the memory of this process: the host's available memory
// and the limits of its cgroups.
func HostMemory() []machine.MemoryLimit { return room.Memory(os.DirFS("/")) }
