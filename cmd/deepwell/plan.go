package main

import (
	"fmt"
	"io"
	"math"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
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
				return writePlans(a.stdout, found)
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

// axes are the columns of sizes. Some are shown only where a plan has more than 1.
var axes = []axis{{plan.DataAxis, false}, {plan.FSDPAxis, true}, {plan.TensorAxis, true},
	{plan.ContextAxis, false}, {plan.ExpertAxis, false}, {plan.PipelineAxis, true}}

type axis struct {
	name   string
	always bool
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
	if found.Emit != "" {
		fmt.Fprintf(w, "\n%s", found.Emit)
	}
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

func writeTable(w io.Writer, choices []autoplan.Choice) error {
	shown := lists.Filter(axes, func(a axis) bool {
		return a.always || slices.ContainsFunc(choices, func(c autoplan.Choice) bool {
			return c.Plan.Size(a.name) > 1
		})
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	head := []string{"#"}
	for _, a := range shown {
		head = append(head, a.name)
		if a.name == plan.FSDPAxis {
			head = append(head, "zero")
		}
	}
	head = append(head, "schedule", "microbatch", "recompute", "step (90 %)", "tok/s/GPU", "MFU",
		"peak", "why")
	fmt.Fprintln(t, strings.Join(head, "\t"))
	for n, c := range choices {
		row := []string{strconv.Itoa(n + 1)}
		for _, a := range shown {
			size := strconv.FormatInt(c.Plan.Size(a.name), 10)
			if a.name == plan.ContextAxis && c.Plan.Size(a.name) > 1 {
				size += " " + c.Plan.CP.Kind
			}
			if a.name == plan.ExpertAxis && c.Plan.GathersTokens() {
				size += " gather"
			}
			if a.name == plan.ExpertAxis && c.Plan.EPOverlap {
				size += " overlap"
			}
			row = append(row, size)
			if a.name == plan.FSDPAxis {
				row = append(row, c.Plan.FSDP.ZeRO())
			}
		}
		row = append(row, scheduleOf(c), fmt.Sprintf("%d×%d", c.Plan.Microbatches,
			c.Plan.MicrobatchSequences()/c.Plan.DataParallelSize()), recomputeOf(c),
			fmt.Sprintf("%.3g s (%.3g–%.3g)", c.Step, c.Low, c.High), human.Thousands(int64(c.Rate)),
			fmt.Sprintf("%.1f %%", 100*c.MFU), gib(c.Peak)+" GiB", c.Why)
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	return t.Flush()
}

func scheduleOf(c autoplan.Choice) string {
	p := c.Plan.PP
	switch {
	case p.Size <= 1:
		return "-"
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
