package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

func (a *app) verify() *cobra.Command {
	job, live := deepwell.VerifyJob{}, deepwell.VerifyGPUJob{}
	var byReplay, onGPU bool
	cmd := documented("verify", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if onGPU && !byReplay {
				live.Seed = job.Seed
				return a.verifyGPU(cmd, args, live)
			}
			if err := one("plan or model")(cmd, args); err != nil {
				return err
			}
			if job.Source = args[0]; byReplay == onGPU {
				return diag.New(diag.BadUsage, "verify needs one method: --replay or --gpu").
					Try("deepwell verify --replay %s", job.Source)
			}
			text := &verifyText{w: a.stdout}
			if !a.json {
				job.Progress = text.progress
			}
			done, err := call(a, cmd, (*deepwell.Env).Verify, job)
			if done == nil || len(done.Programs)+len(done.Missing) == 0 {
				return err
			}
			if a.print(done); !a.json {
				text.end(done, job.Quick)
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.BoolVar(&byReplay, "replay", false,
		"run what XLA compiled for the GPU on CPU devices, and compare every result")
	flags.BoolVar(&onGPU, "gpu", false,
		"run programs on this host's GPUs, and compare with CPU devices")
	flags.StringVarP(&live.Out, "out", "o", "verify-gpu.json", "file of the report of --gpu")
	flags.DurationVar(&live.Timeout, "timeout", 5*time.Minute,
		"time for --gpu; what is left then is skipped, and named")
	flags.BoolVar(&job.Quick, "quick", false, "do not compile the full plan, which can take minutes")
	flags.StringVar(&job.Cluster, "cluster", "",
		"cluster, such as 8xb200, instead of the plan's (default 1xb200 for a model)")
	flags.StringVar(&job.Precision, "precision", "",
		"precision of linear-layer GEMMs, instead of the plan's: bf16, mxfp8, nvfp4; no policy file")
	flags.Uint64Var(&job.Seed, "seed", 1, "seed of the inputs")
	return cmd
}

// A verifyText prints a verification while it goes on: rows as programs are done.
type verifyText struct {
	w     io.Writer
	begun bool
	width int // of the column of programs
	rows  int // that were printed
}

// progress prints what is new: the plan and what was made of it, then rows.
func (t *verifyText) progress(d *deepwell.VerifyResult) {
	if !t.begun {
		t.begun = true
		t.begin(d)
	}
	for _, o := range d.Programs[t.rows:] {
		compile := fmt.Sprintf("%.0f s", o.Compile)
		if o.Cached {
			compile = "cached"
		}
		t.row(programTitle(o.Program, o.Twins), human.Small(o.Apart), human.Small(o.Bound),
			fmt.Sprintf("%d of %d", o.Exact, o.Arrays), compile, fmt.Sprintf("%.0f s", o.Replay),
			cmp.Or(o.Worst, "-"))
		t.beyond(o)
	}
	t.rows = len(d.Programs)
}

// begin prints the plan, the small one, and the head of the table.
func (t *verifyText) begin(d *deepwell.VerifyResult) {
	title := func(cluster, mesh string) string {
		words := []string{clusterTitle(cluster), mesh}
		return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), " · ")
	}
	w := t.w
	fmt.Fprintf(w, "%s · %s · %s\n", d.Model, title(d.Cluster, d.Mesh), d.Precision)
	recomputed := "nothing recomputed"
	if len(d.Recompute) > 0 {
		recomputed = "recomputed: " + strings.Join(lists.Map(d.Recompute,
			func(t ir.Tag) string { return string(t) }), ", ")
	}
	fmt.Fprintf(w, "step        seq %d · batch %d · %s\n", d.Seq, d.Batch, recomputed)
	for _, note := range d.Notes {
		paragraph(w, "note", strings.Fields(note), " ")
	}
	programs := len(d.Programs) + len(d.Missing)
	fmt.Fprintf(w, "replays     %s · %s, seed %d\n", title(d.Small.Cluster, d.Small.Mesh),
		human.Count(programs, "program"), d.Seed)
	changes := lists.Map(d.Small.Changes, replay.Change.String)
	if d.Small.Windowed > 0 {
		changes = append(changes, fmt.Sprintf("layers kept: %d windowed, %d full", d.Small.Windowed,
			d.Small.Full))
	}
	paragraph(w, "made small", changes, " · ")
	fmt.Fprintln(w, "apart is the norm of the difference over the reference's; "+
		"a bound of 0 asks for equal bits")
	t.width = len("program")
	for _, o := range d.Programs {
		t.width = max(t.width, len([]rune(programTitle(o.Program, o.Twins))))
	}
	for _, m := range d.Missing {
		t.width = max(t.width, len([]rune(programTitle(m.Program, m.Twins))))
	}
	t.row("program", "apart", "bound", "equal bits", "compile", "replay", "worst array")
}

func (t *verifyText) row(program, apart, bound, equal, compile, replay, worst string) {
	fmt.Fprintf(t.w, "%-*s  %-7s  %-5s  %-10s  %-7s  %-6s  %s\n", t.width, program, apart, bound,
		equal, compile, replay, worst)
}

// mostBeyond is how many arrays beyond the bound are printed for a program; JSON has all.
const mostBeyond = 5

// beyond lists the arrays of a program that are beyond the bound, the worst first.
func (t *verifyText) beyond(o *replay.Outcome) {
	for _, f := range o.Beyond[:min(mostBeyond, len(o.Beyond))] {
		fmt.Fprintf(t.w, "  beyond    %s  %s: %s of %s elements differ\n", human.Small(f.Relative),
			f.Name, human.Thousands(f.Elements-f.Equal), human.Thousands(f.Elements))
	}
	if more := len(o.Beyond) - mostBeyond; more > 0 {
		fmt.Fprintf(t.w, "  beyond    and %d more; --json lists them\n", more)
	}
}

// end prints what a replay trusts, how the full plan differs, and the verdict.
func (t *verifyText) end(d *deepwell.VerifyResult, quick bool) {
	t.progress(d)
	w := t.w
	for _, o := range d.Programs {
		if len(o.Zeros) > 0 {
			paragraph(w, "zeros", append([]string{o.Program + " gives zeros, which show nothing: " +
				o.Zeros[0]}, o.Zeros[1:]...), ", ")
		}
		if len(o.Noise) > 0 {
			paragraph(w, "noise", append([]string{"zero but for rounding, compared with the size of " +
				"other gradients: " + o.Noise[0]}, o.Noise[1:]...), ", ")
		}
	}
	if len(d.Conventions) > 0 {
		paragraph(w, "trusts", append([]string{"the conventions " + d.Conventions[0]},
			d.Conventions[1:]...), ", ")
	}
	switch {
	case d.Full != nil:
		writeFull(w, d)
	case quick:
		fmt.Fprintln(w, "full plan   not compiled (--quick)")
	default:
		fmt.Fprintln(w, "full plan   not compared")
	}
	fmt.Fprintf(w, "%-11s %s\nreplayed on CPU devices, not run on a GPU; %.0f s\n", "verdict",
		verdict(d), d.Seconds)
}

// verdict is the worst array of all, or says that it is too early.
func verdict(d *deepwell.VerifyResult) string {
	o := d.Worst()
	stopped := fmt.Sprintf("stopped after %d of %s", len(d.Programs),
		human.Count(len(d.Programs)+len(d.Missing), "program"))
	switch {
	case d.Verdict == deepwell.VerdictStopped:
		return stopped + ", no verdict"
	case d.Verdict == deepwell.VerdictBeyond && len(d.Missing) > 0:
		return fmt.Sprintf("%s of %s is beyond its bound; %s", o.Worst, o.Program, stopped)
	case d.Verdict == deepwell.VerdictBeyond:
		return fmt.Sprintf("%s of %s is beyond its bound", o.Worst, o.Program)
	case o.Worst == "":
		return "every result has equal bits"
	}
	return fmt.Sprintf("all within their bounds, the worst %s of %s: %s of %s", o.Worst, o.Program,
		human.Small(o.Apart), human.Small(o.Bound))
}

// programTitle is the name of a program, and how many others have the same text.
func programTitle(name string, twins []string) string {
	if n := len(twins); n > 0 {
		return fmt.Sprintf("%s + %d alike", name, n)
	}
	return name
}

// writeFull tells what only the full plan's programs are made of, or only the small ones.
func writeFull(w io.Writer, d *deepwell.VerifyResult) {
	f := d.Full
	fits := "fits"
	if !f.Fits {
		fits = "does not fit"
	}
	fmt.Fprintf(w, "memory      needs %s of %s, %s; without cuDNN's workspaces\n", event.Size(f.Needs),
		event.Size(f.Capacity), fits)
	fmt.Fprintf(w, "full plan   %d programs compiled for %s in %.0f s", f.Programs,
		clusterTitle(d.Cluster), f.Seconds)
	if len(f.OnlyFull)+len(f.OnlySmall) == 0 {
		fmt.Fprintln(w, ": made of the same opcodes, custom calls,\n            "+
			"kinds of fusion and collectives as the replayed ones")
		return
	}
	fmt.Fprintln(w)
	for _, side := range []struct {
		what string
		of   map[step.Kind][]string
	}{{"only in the full", f.OnlyFull}, {"only in the small", f.OnlySmall}} {
		for _, kind := range slices.Sorted(maps.Keys(side.of)) {
			for _, line := range side.of[kind] {
				fmt.Fprintf(w, "            %s %s: %s\n", side.what, kind, line)
			}
		}
	}
}

// paragraph prints words behind a label, in lines of 100 columns.
func paragraph(w io.Writer, label string, words []string, between string) {
	if len(words) == 0 {
		return
	}
	line := fmt.Sprintf("%-11s", label)
	for i, word := range words {
		if i < len(words)-1 {
			word += strings.TrimRight(between, " ")
		}
		if len([]rune(line))+1+len([]rune(word)) > 100 {
			fmt.Fprintln(w, line)
			line = fmt.Sprintf("%-11s", "")
		}
		line += " " + word
	}
	fmt.Fprintln(w, line)
}
