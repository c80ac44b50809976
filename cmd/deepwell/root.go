package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/lists"
)

// An app is one invocation of the program.
type app struct {
	stdout, stderr io.Writer
	getenv         func(string) string
	json           bool
	jsonFile       string // gets what --json prints, while text goes on; "" for none
	verbose        bool
	finish         func() // wipes the live line
	result         any    // what --json prints when the command has ended; nil if it gave nothing
}

// run executes one command line and gives the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer,
	getenv func(string) string) int {
	a := &app{stdout: stdout, stderr: stderr, getenv: getenv, finish: func() {}}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	a.finish()
	if err == nil {
		a.flush(nil)
		return 0
	}
	why, ok := errors.AsType[stopped](context.Cause(ctx))
	if e := diag.From(err); ok && e.Code == diag.Canceled {
		err = e.Exit(why.class())
	}
	return a.fail(err)
}

// fail prints an error and gives the exit status.
func (a *app) fail(err error) int {
	e := diag.From(err)
	switch {
	case a.json || a.jsonFile != "":
		a.flush(e)
	case e.Class() == diag.Interrupted || e.Class() == diag.Terminated:
		// It was asked for: no error, so no code.
		fmt.Fprintln(a.stderr, strings.Join(slices.DeleteFunc([]string{e.What, e.Fix},
			func(s string) bool { return s == "" }), "; "))
	default:
		fmt.Fprint(a.stderr, e.Format())
	}
	return int(e.Class())
}

func (a *app) root() *cobra.Command {
	show := false
	root := documented("deepwell", &cobra.Command{
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if show {
				_, err := fmt.Fprintln(a.stdout, "deepwell", version)
				return err
			}
			return cmd.Help()
		},
	})
	// A template for cobra's own flag would add 3 MB: text/template keeps every method alive.
	root.Flags().BoolVar(&show, "version", false, "print the version")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print one JSON object instead of text")
	root.PersistentFlags().StringVar(&a.jsonFile, "json-file", "",
		"write what --json prints to this file; text is printed as without it, errors are not")
	root.PersistentFlags().BoolVarP(&a.verbose, "verbose", "v", false, "print the name of every pass")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
			now := renamedFlags[e.GetSpecifiedName()]
			if now != "" && cmd.Flags().Lookup(now) != nil {
				return diag.New(diag.BadUsage, "--%s is now --%s", e.GetSpecifiedName(), now).
					Try("%s --%s", cmd.CommandPath(), now)
			}
		}
		return usage(cmd, "%v", err)
	})
	root.AddCommand(a.engine(), a.doctor(), a.probe(), a.preflight(), a.models(), a.capture(),
		a.data(), a.plan(), a.policy(), a.compile(), a.kernels(), a.bench(), a.verify(),
		a.dryrun(), a.train(),
		a.launch(), a.report(), a.serve(), a.parity(), a.ckpt(), a.export(), a.quantize())
	root.SetHelpCommand(a.help(root))
	return root
}

// version is the program's, and the Python package's.
const version = "0.1.0"

// renamedFlags gives the present name of flags that had another one.
var renamedFlags = map[string]string{"replay": "rerun", "handover": "reference-run"}

// usage is an error of the command line, with the way to learn more.
func usage(cmd *cobra.Command, format string, args ...any) error {
	return diag.New(diag.BadUsage, format, args...).Try("%s --help", cmd.CommandPath())
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	names := lists.Map(cmd.Commands(), (*cobra.Command).Name)
	if near := diag.Nearest(args[0], names); near != "" {
		return diag.New(diag.BadUsage, "%s has no command %q", cmd.CommandPath(), args[0]).
			Try("%s %s", cmd.CommandPath(), near)
	}
	return usage(cmd, "%s does not take %q", cmd.CommandPath(), args[0])
}

// one demands one argument, which has a noun.
func one(noun string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usage(cmd, "%s takes one %s; %d were given", cmd.Name(), noun, len(args))
		}
		return nil
	}
}

// takes demands n arguments, named as the usage line names them.
func takes(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != n {
			return usage(cmd, "%s needs %s", cmd.CommandPath(), what)
		}
		return nil
	}
}

// group makes a command of nothing but commands.
func group(name string, commands ...*cobra.Command) *cobra.Command {
	cmd := documented(name, &cobra.Command{Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }})
	cmd.AddCommand(commands...)
	return cmd
}

// env opens the user's folders, with a sink that suits where the output goes: a live line on a
// terminal, plain lines in a pipe, and silence beside JSON.
func (a *app) env() (*deepwell.Env, error) {
	env, err := deepwell.NewEnv(a.getenv, a.sink())
	if err == nil {
		env.Child = isolate.Self
	}
	return env, err
}

func (a *app) sink() event.Sink {
	if f, ok := a.stderr.(*os.File); ok && term.IsTerminal(int(f.Fd())) && !a.json {
		live := event.NewLive(a.stderr, func() int {
			width, _, err := term.GetSize(int(f.Fd()))
			if err != nil {
				return 80
			}
			return width
		}, time.Now)
		a.finish = ticking(live)
		return a.quiet(live)
	}
	return a.quiet(event.NewPlain(a.stderr))
}

// ticking has a live line say every quarter of a second what goes on; the function that it gives
// ends that, and wipes the line.
func ticking(live *event.Live) (end func()) {
	ticks := time.NewTicker(time.Second / 4)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-ticks.C:
				live.Tick()
			case <-done:
				return
			}
		}
	}()
	return sync.OnceFunc(func() {
		ticks.Stop()
		close(done)
		live.Close()
	})
}

// quiet keeps the names of passes for -v and the live line, and everything but warnings away from
// JSON users.
func (a *app) quiet(s event.Sink) event.Sink {
	return sinkFunc(func(e event.Event) {
		keep := !a.json
		switch is := e.(type) {
		case event.Phase:
			if keep && !a.verbose {
				s.Emit(event.Busy{Task: is.Name})
			}
			keep = a.verbose
		case event.Compiled:
			keep = a.verbose
		case event.Warning:
			keep = true
		}
		if keep {
			s.Emit(e)
		}
	})
}

// A sinkFunc is a function that takes events.
type sinkFunc func(event.Event)

func (f sinkFunc) Emit(e event.Event) { f(e) }

// call opens the user's folders, runs a verb of the library and wipes the live line.
func call[J, R any](a *app, cmd *cobra.Command,
	verb func(*deepwell.Env, context.Context, J) (R, error), job J) (r R, err error) {
	env, err := a.env()
	if err == nil {
		r, err = verb(env, cmd.Context(), job)
	}
	a.finish()
	return r, err
}

// serve is most of a command: it calls a verb and prints its result.
func serve[J, R any](a *app, cmd *cobra.Command,
	verb func(*deepwell.Env, context.Context, J) (R, error), job J, text func(R) error) error {
	r, err := call(a, cmd, verb, job)
	if err != nil {
		return err
	}
	return a.tell(r, func() error { return text(r) })
}

// tell prints a result: as JSON, or as text says it.
func (a *app) tell(v any, text func() error) error {
	if a.print(v); a.json {
		return nil
	}
	return text()
}

// table prints rows in columns; the cells of a row have tabs between them.
func (a *app) table(head string, rows func(w io.Writer)) error {
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, head)
	rows(w)
	return w.Flush()
}

// print keeps a value for the end of the command, if it is to be JSON: --json promises one object,
// and a verb may still fail after it has a result.
func (a *app) print(v any) {
	if a.json || a.jsonFile != "" {
		a.result = v
	}
}

// flush writes the result as indented JSON, an object with the error, if there is one, as its last
// member.
func (a *app) flush(failed *diag.Error) {
	if a.result == nil && failed == nil {
		return
	}
	js := []byte("{}")
	var err error
	if a.result != nil {
		js, err = json.Marshal(a.result)
	}
	if failed != nil && err == nil {
		var what []byte
		if what, err = json.Marshal(failed); err == nil {
			js = bytes.TrimSuffix(js, []byte("}"))
			if len(js) > 1 {
				js = append(js, ',')
			}
			js = fmt.Appendf(js, `"error":%s}`, what)
		}
	}
	var out bytes.Buffer
	if err == nil {
		err = json.Indent(&out, js, "", "  ")
	}
	out.WriteByte('\n')
	if err == nil && a.json {
		_, err = a.stdout.Write(out.Bytes())
	}
	if err == nil && a.jsonFile != "" {
		err = os.WriteFile(a.jsonFile, out.Bytes(), 0o666) // may be a pipe: it is not replaced
	}
	if err != nil {
		fmt.Fprintln(a.stderr, diag.From(err).Format())
	}
}

// help prints the help of a command, or with --json all commands as data.
func (a *app) help(root *cobra.Command) *cobra.Command {
	return documented("help", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.tell(describe(root), func() error {
				found, rest, err := root.Find(args)
				if err != nil || len(rest) > 0 {
					return usage(root, "there is no command %q", strings.Join(args, " "))
				}
				return found.Help()
			})
		},
	})
}

// A commandHelp is one command as data.
type commandHelp struct {
	Name     string        `json:"name"`
	Use      string        `json:"use"`
	Short    string        `json:"short"`
	Examples []string      `json:"examples,omitempty"`
	Flags    []flagHelp    `json:"flags,omitempty"`
	Commands []commandHelp `json:"commands,omitempty"`
}

type flagHelp struct {
	Name    string `json:"name"`
	Default string `json:"default,omitempty"`
	Help    string `json:"help"`
}
