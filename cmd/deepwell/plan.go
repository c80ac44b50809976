package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"runtime/debug"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

func (a *app) plan() *cobra.Command {
	job := deepwell.PlanJob{}
	var text struct{ batch, precision, goal, fix, from, calibrate string }
	cmd := documented("plan", &cobra.Command{
		Args: one("model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if job.Cluster == "" {
				return usage(cmd, "plan needs a cluster: --cluster 8xb200")
			}
			job.Source, job.Goal = args[0], autoplan.Goal(text.goal)
			job.Precisions, job.Calibrate = commas(text.precision), commas(text.calibrate)
			var err error
			if job.Batch, err = parseBatch(text.batch); err != nil {
				return err
			}
			if job.Fixed, job.Devices, err = parseFix(text.fix); err != nil {
				return err
			}
			if job.FromStack, job.FromFile, err = parseFrom(text.from); err != nil {
				return err
			}
			// A search keeps most of what it allocates: to collect it early costs a sixth of its time.
			defer debug.SetGCPercent(debug.SetGCPercent(searchGC))
			return serve(a, cmd, (*deepwell.Env).Plan, job, func(found *deepwell.PlanResult) error {
				if found.Emit == "" {
					return writePlans(a.stdout, found)
				}
				if err := writePlans(a.stderr, found); err != nil { // so that > FILE has the config alone
					return err
				}
				_, err := io.WriteString(a.stdout, found.Emit)
				return err
			})
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.Cluster, "cluster", "", "cluster to plan for, such as 64xgb200")
	flags.Int64Var(&job.Seq, "seq", 0,
		"tokens per sequence (default 8192, or the model's context if shorter)")
	flags.StringVar(&text.batch, "batch", "",
		"global batch: sequences, tokens as in 4Mtok (4 × 2^20 tokens), or a limit as in max=16Mtok "+
			"(default: chosen for the cluster, and printed)")
	flags.StringVar(&text.precision, "precision", "",
		"precision of linear-layer GEMMs: bf16, fp8, mxfp8, nvfp4, f32, or a policy file; of several, "+
			"separated by commas, the planner picks the best (default bf16)")
	flags.StringVar(&text.goal, "goal", "time", "what to minimize: time, money, or memory\n"+
		"(of a device, among plans at most 10 % slower than the fastest)")
	flags.StringVar(&text.fix, "fix", "",
		"constraints on the plan, such as tp=8,pp=4,recompute=attn+mlp,devices=512")
	flags.StringVar(&job.Stack, "stack", "",
		"framework that runs the plan: deepwell, megatron (megatron-26.08 is the newest release, "+
			"megatron-26.04 and megatron-2022 older ones), torchtitan, maxtext "+
			"(default: what --emit or --from names, else deepwell)")
	flags.StringVar(&text.from, "from", "",
		"evaluate your current config and suggest changes: megatron=FILE, torchtitan=FILE, maxtext=FILE")
	flags.StringVar(&job.Emit, "emit", "",
		"print the best plan as a config of megatron, torchtitan or maxtext")
	flags.StringVar(&text.calibrate, "calibrate", "", calibrateUsage)
	flags.IntVar(&job.Top, "top", 5, "number of plans to print")
	flags.StringVarP(&job.Output, "output", "o", "",
		"write the best plan to this file, such as plan.json")
	return cmd
}

// searchGC is the GOGC value of a search.
const searchGC = 400

const calibrateUsage = "correct predictions with measurements: a run folder with its plan, or " +
	"its calibration.json; several separated by commas"

// runsOf spells a number of runs.
func runsOf(n int) string {
	if n == 1 {
		return "one measured run"
	}
	return fmt.Sprintf("%d measured runs", n)
}

func writePlans(w io.Writer, found *deepwell.PlanResult) error {
	best := found.Choices[0]
	if found.Current != nil {
		writeCurrent(w, found.Current)
	}
	fmt.Fprintf(w, "%s, %s parameters · %s · %s plans, %s evaluated, in %.1f s\n", found.Model,
		human.Amount(float64(found.Parameters)), clusterTitle(found.Cluster),
		human.Thousands(found.Space), human.Thousands(found.Priced), found.Seconds)
	fmt.Fprintf(w, "global batch %s sequences of %s tokens, %s tokens per step\n",
		human.Thousands(best.Plan.Batch), human.Thousands(best.Plan.Seq),
		human.Amount(float64(best.Plan.Batch*best.Plan.Seq)))
	if err := writeTable(w, found.Choices); err != nil {
		return err
	}
	if found.Calibrated > 0 {
		fmt.Fprintf(w, "calibrated by %s of this model on this GPU\n", runsOf(found.Calibrated))
	}
	fmt.Fprintf(w, "peak of #1: %s GiB\n", causes(best.Memory))
	if best.MFU > 0 {
		fmt.Fprintln(w, "MFU: model FLOPs of the step, causal attention counted at half, over the BF16 "+
			"peak")
	}
	fmt.Fprintf(w, "cost model: %s, %s\n", found.Stack, found.Source)
	fmt.Fprintf(w, "1T tokens: %s, $%s at $3.00 per GPU-hour\n", days(found.Bill.Days),
		human.Amount(found.Bill.Money))
	if found.Output != "" {
		fmt.Fprintf(w, "wrote %s · next: %s\n", found.Output, found.Next)
	}
	return nil
}

// causes lists a device's memory by purpose, in GiB.
func causes(m program.Memory) string {
	list := lists.Map(m.Causes(), func(c program.Cause) string { return c.Name + " " + gib(c.Bytes) })
	return strings.Join(list, " · ")
}

// writeCurrent prints the user's current config and the changes that help, the best first.
func writeCurrent(w io.Writer, t *deepwell.CurrentSetup) {
	d := t.Choice
	verdict := ""
	if d.Peak > d.Capacity {
		verdict = ", which does not fit"
	}
	fmt.Fprintf(w, "now: %s · %.3g s (%.3g–%.3g) · %s tok/s/GPU · %s of %s GiB%s · bubble %.1f %%\n",
		t.File, d.Step, d.Low, d.High, human.Thousands(int64(d.Rate)), gib(d.Peak), gib(d.Capacity),
		verdict, 100*d.Bubble)
	for _, h := range t.Changes {
		fmt.Fprintf(w, "  %+5.1f %%  %s  (%s GiB)\n", 100*(h.Step/d.Step-1), h.Change, gib(h.Peak))
	}
	for _, n := range t.Notes {
		fmt.Fprintf(w, "  note: %s\n", n)
	}
}

// columns is how wide a terminal is that shows a table of plans without wrapping its lines.
const columns = 80

// writeTable prints plans, three lines each: the figures with the sizes of axes, the rest of the
// layout, and what decides.
func writeTable(w io.Writer, choices []autoplan.Choice) error {
	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "#\tstep (90 %)\ttok/s/GPU\tMFU\tpeak\tplan")
	for n, c := range choices {
		fmt.Fprintf(t, "%d\t%.3g s (%.3g–%.3g)\t%s\t%.1f %%\t%s GiB\t%s\n", n+1, c.Step, c.Low, c.High,
			human.Thousands(int64(c.Rate)), 100*c.MFU, gib(c.Peak), cmp.Or(c.Plan.Label(), "one device"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	table := strings.Split(text.String(), "\n")
	for n, c := range choices {
		if n == 0 {
			fmt.Fprintln(w, table[0])
		}
		fmt.Fprintln(w, table[n+1])
		indent := strings.Repeat(" ", 3)
		for _, text := range []string{layoutOf(c), c.Why} {
			for _, line := range wrapped(text, columns-len(indent)) {
				fmt.Fprintln(w, indent+line)
			}
		}
	}
	return nil
}

// layoutOf is what of a plan is not the size of an axis.
func layoutOf(c autoplan.Choice) string {
	p := c.Plan
	parts := []string{fmt.Sprintf("microbatches %d×%d", p.Microbatches,
		p.MicrobatchSequences()/p.DataParallelSize())}
	if p.CP.Size > 1 {
		parts = append(parts, "cp "+p.CP.Kind)
	}
	if p.GathersTokens() {
		parts = append(parts, "ep gather")
	}
	if p.EPOverlap {
		parts = append(parts, "ep overlap")
	}
	if s := scheduleOf(c); s != "" {
		parts = append(parts, s)
	}
	return strings.Join(append(parts, "recompute "+recomputeOf(c)), " · ")
}

// wrapped breaks a text into lines of at most some columns.
func wrapped(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len([]rune(line))+1+len([]rune(word)) > width {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

func scheduleOf(c autoplan.Choice) string {
	p := c.Plan.PP
	switch {
	case p.Size <= 1:
		return ""
	case p.Virtual > 1 && p.Schedule == "interleaved":
		return fmt.Sprintf("%s×%d", p.Schedule, p.Virtual)
	}
	return p.Schedule
}

func recomputeOf(c autoplan.Choice) string {
	words := lists.Map(c.Plan.Recompute, func(t ir.Tag) string { return string(t) })
	for _, o := range c.Plan.Offload {
		words = append(words, "offload "+o)
	}
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, "+")
}

func gib(bytes int64) string {
	x := float64(bytes) / (1 << 30)
	if x >= 99.95 {
		return strconv.FormatFloat(x, 'f', 0, 64)
	}
	return strconv.FormatFloat(x, 'f', 1, 64)
}

// days writes a time of days: 0.4 days, 82.3 days, 1,240 days.
func days(n float64) string {
	if n >= 99.95 {
		return human.Thousands(int64(math.Round(n))) + " days"
	}
	return strconv.FormatFloat(n, 'f', 1, 64) + " days"
}

// clusterTitle spells 64xgb200 as people do.
func clusterTitle(cluster string) string {
	n, gpu, _ := strings.Cut(cluster, "x")
	count, err := strconv.ParseInt(n, 10, 64)
	if err != nil {
		return cluster
	}
	return human.Thousands(count) + " " + strings.ToUpper(gpu)
}
