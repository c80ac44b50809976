package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

func (a *app) verify() *cobra.Command {
	job := deepwell.VerifyJob{}
	var byReplay bool
	cmd := documented("verify", &cobra.Command{
		Args: one("plan or model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !byReplay {
				return usage(cmd, "verify needs a method: --replay")
			}
			job.Source = args[0]
			done, err := call(a, cmd, (*deepwell.Env).Verify, job)
			if done == nil || len(done.Programs) == 0 {
				return err
			}
			if a.print(done); a.json {
				return err
			}
			if printed := a.writeVerify(done); printed != nil {
				return printed
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.BoolVar(&byReplay, "replay", false,
		"run what XLA compiled for the GPU on CPU devices, and compare every result")
	flags.BoolVar(&job.Quick, "quick", false, "do not compile the full plan, which can take minutes")
	flags.StringVar(&job.Cluster, "cluster", "", "cluster of a model, such as 8xb200 (default 1xb200)")
	flags.StringVar(&job.Precision, "precision", "",
		"precision of linear-layer GEMMs, instead of the plan's: bf16, mxfp8, nvfp4")
	return cmd
}

// writeVerify prints the programs in a table, the worst array, and how the full plan differs.
func (a *app) writeVerify(d *deepwell.VerifyResult) error {
	title := func(cluster, mesh string) string {
		words := []string{clusterTitle(cluster), mesh}
		return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), " · ")
	}
	w := a.stdout
	fmt.Fprintf(w, "%s · %s · %s\n", d.Model, title(d.Cluster, d.Mesh), d.Precision)
	fmt.Fprintf(w, "replayed    %s\n", title(d.Small.Cluster, d.Small.Mesh))
	paragraph(w, "made small", lists.Map(d.Small.Changes, replay.Change.String), " · ")
	if err := a.table("program\tapart\tbound\tequal bits\tcompile\treplay\tworst array",
		func(w io.Writer) {
			for _, o := range d.Programs {
				fmt.Fprintf(w, "%s\t%s\t%s\t%d of %d\t%.0f s\t%.0f s\t%s\n", programTitle(o),
					small(o.Apart), small(o.Bound), o.Exact, o.Arrays, o.Compile, o.Replay, worstArray(o))
			}
		}); err != nil {
		return err
	}
	for _, o := range d.Programs {
		if len(o.Zeros) > 0 {
			paragraph(w, "zeros", append([]string{o.Program + " gives zeros, which show nothing: " +
				o.Zeros[0]}, o.Zeros[1:]...), ", ")
		}
	}
	paragraph(w, "trusts", d.Conventions, ", ")
	if d.Full != nil {
		writeFull(w, d)
	}
	fmt.Fprintf(w, "%-11s %s\nreplayed on CPU devices, not run on a GPU; %.0f s\n", "verdict",
		verdict(d), d.Seconds)
	return nil
}

// verdict is the worst array of all.
func verdict(d *deepwell.VerifyResult) string {
	o := d.Worst()
	if slices.ContainsFunc(d.Programs, func(o *replay.Outcome) bool { return len(o.Beyond) > 0 }) {
		return fmt.Sprintf("%s of %s is beyond its bound", o.Worst, o.Program)
	}
	if o.Worst == "" {
		return "every result has equal bits"
	}
	return fmt.Sprintf("all within their bounds, the worst %s of %s: %s of %s", o.Worst, o.Program,
		small(o.Apart), small(o.Bound))
}

// programTitle is the name of a program, and how many others have the same text.
func programTitle(o *replay.Outcome) string {
	if n := len(o.Twins); n > 0 {
		return fmt.Sprintf("%s + %d alike", o.Program, n)
	}
	return o.Program
}

// worstArray names the array that is farthest from the reference, and how many break the bound.
func worstArray(o *replay.Outcome) string {
	if n := len(o.Beyond); n > 0 {
		return fmt.Sprintf("%s; %d beyond the bound", o.Worst, n)
	}
	return cmp.Or(o.Worst, "-")
}

// small writes a relative difference.
func small(x float64) string {
	switch x {
	case 0:
		return "0"
	case math.MaxFloat64:
		return "NaN"
	}
	return strings.NewReplacer(".0e-0", "e-", "e-0", "e-").Replace(fmt.Sprintf("%.1e", x))
}

// writeFull tells what only the full plan's programs are made of, or only the small ones.
func writeFull(w io.Writer, d *deepwell.VerifyResult) {
	f := d.Full
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
