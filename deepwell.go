package deepwell

import (
	"context"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/plugin"
)

// maxText bounds what is read of a recipe, a plan, a policy, or another program's settings: a
// hundred times the largest that is known, and nothing that a machine cannot hold.
const maxText = 4 << 20

// An Env is where the verbs find engines and caches, and where they report progress.
type Env struct {
	Engines string     // folder of installed engines
	Cache   string     // folder of the caches of programs and tokens; "" turns them off
	Events  event.Sink // gets an event for each pass, step, warning; nil drops them
	// Environ is the environment as engines read it; nil is the process's.
	Environ []string
	// Child is a deepwell binary that compiles in a process of its own, so that a crash of the
	// compiler is an error ([diag.CompilerCrashed]); "" compiles in this process. What runs on
	// devices runs here.
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

// warn emits warnings, before any result.
func (e *Env) warn(texts []string) {
	for _, text := range texts {
		e.Events.Emit(event.Warning{Text: text})
	}
}

// A verb is one running command: a list of named passes that ends at the first error.
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

// get runs a pass that returns a value; after an earlier error it returns the zero value.
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
