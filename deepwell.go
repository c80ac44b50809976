package deepwell

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/step"
)

// An Env is where the verbs work and whom they tell.
type Env struct {
	Engines string     // folder of installed engines
	Cache   string     // folder of the caches of programs and tokens; "" turns them off
	Events  event.Sink // hears every pass
	// Environ is the environment as engines read it; nil is that of the process.
	Environ []string
	// Child is a deepwell binary that compiles in a process of its own, so that a crash of the
	// compiler is an error (DW2207); "" compiles in this process. What runs on devices runs here.
	Child string
}

// NewEnv finds the user's folders: DEEPWELL_HOME and DEEPWELL_CACHE, or else the places that the
// system has for data and caches.
func NewEnv(getenv func(string) string, events event.Sink) (*Env, error) {
	engines, err := plugin.DefaultDir(getenv)
	if err != nil {
		return nil, err
	}
	cache := getenv("DEEPWELL_CACHE")
	if cache == "" {
		if base, err := os.UserCacheDir(); err == nil {
			cache = filepath.Join(base, "deepwell")
		}
	}
	return &Env{Engines: engines, Cache: cache, Events: events}, nil
}

// Install brings an engine onto this machine, from the user's package index or from wheels.
func (e *Env) Install(ctx context.Context, name string, from []string) (*plugin.Bundle, error) {
	v := e.begin(ctx, "install")
	in := &plugin.Installer{Dir: e.Engines, From: from, Events: e.Events}
	bundle := get(v, "fetch, check and unpack", func() (*plugin.Bundle, error) {
		return in.Install(ctx, name)
	})
	return bundle, v.err
}

// Probe examines the host; measure also times it through the CPU engine.
func (e *Env) Probe(ctx context.Context, o machine.Options, measure bool) (*machine.Machine,
	error) {
	v := e.begin(ctx, "probe")
	o.Engines = get(v, "list engines", e.engines)
	if measure {
		o.Meter = e.meter
	}
	m := get(v, "examine the host", func() (*machine.Machine, error) { return machine.Probe(ctx, o) })
	return m, v.err
}

// A CompileJob is what to compile, for what.
type CompileJob struct {
	Source       string         // a .mlir file, a program file, a plan, or the name of a model
	Seq, Batch   int64          // tokens in a sequence, and sequences, of a model's step
	Cluster      string         // NxCARD; "" is that of a plan
	Precision    string         // of linear layers, of a plan or a model; "" is the plan's, or bf16
	Flags        map[string]any // compile options on top of the program's own
	WithoutCuDNN bool           // withhold cuDNN, to see what its plans add
}

// Compile compiles every stage of a program with the real compiler for the cluster, which need
// not be at hand, and reports what came of it.
func (e *Env) Compile(ctx context.Context, job CompileJob) (*Compilation, error) {
	v := e.begin(ctx, "compile")
	var foot []*step.Footprint
	cluster := get(v, "read the cluster", func() (machine.Cluster, error) { return clusterOf(job) })
	from := get(v, "read the program", func() (*source, error) {
		from, err := readSource(job, cluster)
		if err == nil {
			e.warn(from.warnings)
		}
		return from, err
	})
	reports := get(v, "compile the stages", func() ([]*engine.Report, error) {
		return e.compileStages(ctx, from.program, cluster, job)
	})
	v.pass("compare with the card's memory", func() error {
		if len(reports) > 0 {
			last := reports[len(reports)-1]
			last.Notes = append(last.Notes, from.notes...)
		}
		for _, r := range reports {
			if err := r.Fits(); err != nil {
				return err
			}
		}
		return nil
	})
	if from != nil && from.planned != nil {
		v.pass("hold the programs to the plan", func() error {
			return from.keepsToPlan(reports, cluster.CPU())
		})
		v.pass("add up what a device holds", func() (err error) {
			foot, err = from.footprints(reports)
			for _, f := range foot {
				err = cmp.Or(err, f.Fits())
			}
			return err
		})
	}
	made := &Compilation{Stages: reports, Ranks: foot, Census: v.err == nil && foot != nil}
	if from != nil {
		made.Warnings = from.warnings
	}
	return made, v.err
}

// A Compilation is what became of the stages of a program and, for a plan, what a device holds
// while it trains.
type Compilation struct {
	Stages []*engine.Report `json:"stages"`
	// Ranks are the ranks of a plan's pipeline, or the one of a plan without.
	Ranks []*step.Footprint `json:"ranks,omitempty"`
	// Census tells that the programs of a plan send what the plan says, to the byte.
	Census bool `json:"census,omitempty"`
	// Warnings are what a run on the cluster would compute otherwise than one might think.
	Warnings []string `json:"warnings,omitempty"`
}

// warn tells what a person should know before the figures.
func (e *Env) warn(texts []string) {
	for _, text := range texts {
		e.Events.Emit(event.Warning{Text: text})
	}
}

// Doctor examines everything that the other verbs need, by using it.
func (e *Env) Doctor(ctx context.Context) (*Diagnosis, error) {
	v := e.begin(ctx, "doctor")
	d := &Diagnosis{}
	checks, done := e.checks()
	defer done()
	for _, c := range checks {
		v.pass(c.name, func() error { d.add(ctx, c, e.Events); return ctx.Err() })
	}
	return d, v.err
}

// A verb is one command at work: a list of named passes that ends at the first error.
type verb struct {
	ctx    context.Context
	name   string
	events event.Sink
	err    error
}

func (e *Env) begin(ctx context.Context, name string) *verb {
	if e.Events == nil {
		e.Events = event.Discard
	}
	return &verb{ctx: ctx, name: name, events: e.Events}
}

// pass runs one pass unless an earlier one failed; -v prints its name.
func (v *verb) pass(name string, run func() error) {
	if v.err != nil {
		return
	}
	if err := v.ctx.Err(); err != nil {
		v.err = diag.New(diag.Canceled, "stopped before: %s", name).Wrap(err)
		return
	}
	v.events.Emit(event.Phase{Verb: v.name, Name: name})
	v.err = run()
}

// get runs a pass that makes something; after an earlier error it gives the zero value.
func get[T any](v *verb, name string, run func() (T, error)) (out T) {
	v.pass(name, func() (err error) {
		out, err = run()
		return err
	})
	return out
}

// unwritten is the error for a file that cannot be written; nil if err is.
func unwritten(err error, what, where string) error {
	if err == nil {
		return nil
	}
	return diag.New(diag.FileError, "cannot write %s", what).At("%s", where).Wrap(err)
}

func (e *Env) engines() ([]machine.Engine, error) {
	all, err := plugin.List(e.Engines)
	if err != nil {
		return nil, err
	}
	return lists.Map(all, func(s plugin.Status) machine.Engine {
		return machine.Engine{Name: s.Name, Version: s.Version, Installed: s.Installed}
	}), nil
}
