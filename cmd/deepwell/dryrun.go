package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

func (a *app) dryrun() *cobra.Command {
	job := deepwell.DryRunJob{}
	var text dryRunText
	cmd := documented("dryrun", &cobra.Command{
		Args: one("plan"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Plan, job.Calibrate = args[0], commas(text.calibrate)
			var err error
			if job.Tokens, err = parseTokens(text.tokens); err != nil {
				return err
			}
			if job.WhatIf, err = parseWhatIf(text.whatIf); err != nil {
				return err
			}
			ran, err := call(a, cmd, (*deepwell.Env).DryRun, job)
			// A plan that does not fit has a timeline all the same.
			if ran == nil || ran.Timeline == nil {
				return err
			}
			if a.print(ran); !a.json {
				writeDryRun(a.stdout, ran, text)
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.Report, "report", "", "write an HTML report to this file")
	flags.StringVar(&job.Trace, "trace", "", "write a Perfetto trace to this file")
	flags.StringVar(&text.tokens, "tokens", "1T", "training tokens, such as 15T or 300B")
	flags.Float64Var(&job.Price, "price", 3.00, "price per GPU-hour in US dollars")
	flags.StringVar(&text.whatIf, "what-if", "",
		"what-if scenario: slow=FACTOR@RANK slows all devices of a pipeline rank; links=FACTOR\n"+
			"multiplies the time of every transfer between devices; jitter=SHARE is the standard\n"+
			"deviation of each pass's time; seed=NUMBER")
	flags.StringVar(&job.Precision, "precision", "",
		"precision of linear-layer GEMMs, instead of the plan's: bf16, fp8, mxfp8, nvfp4, f32, or a "+
			"policy file")
	flags.StringVar(&text.calibrate, "calibrate", "", calibrateUsage)
	flags.StringVar(&job.Stack, "stack", "deepwell",
		"framework to predict for: deepwell, megatron (megatron-26.08 is the newest release, "+
			"megatron-26.04 and megatron-2022 older ones), torchtitan, maxtext")
	return cmd
}

// dryRunText holds flags of dryrun as typed.
type dryRunText struct{ tokens, whatIf, calibrate string }

// shownParts is the number of parts of a step's time that are printed, the largest first.
const shownParts = 6

func writeDryRun(w io.Writer, d *deepwell.DryRunResult, text dryRunText) {
	head := []string{d.Model, clusterTitle(d.Cluster), d.Mesh,
		"cost model: " + d.Stack + ", " + d.Source}
	head = slices.DeleteFunc(head, func(s string) bool { return s == "" })
	fmt.Fprintln(w, strings.Join(head, " · "))
	onGPUs, device := d.Capacity > 0, "device"
	if onGPUs {
		device = "GPU"
	}
	mfu := ""
	if d.MFU > 0 {
		mfu = fmt.Sprintf(" · MFU %.1f %%", 100*d.MFU)
	}
	fmt.Fprintf(w, "step        %.3g s (%.3g–%.3g) · %s tok/s/%s%s · bubble %.1f %%\n", d.Step, d.Low,
		d.High, human.Thousands(int64(d.Rate)), device, mfu, 100*d.Bubble)
	if text.whatIf != "" {
		fmt.Fprintf(w, "what if     %s\n", text.whatIf)
	}
	if d.Calibrated > 0 {
		fmt.Fprintf(w, "calibrated  by %s\n", runsOf(d.Calibrated))
	}
	verdict := "fits"
	if d.Peak > d.Capacity {
		verdict = "does not fit"
	}
	if onGPUs {
		fmt.Fprintf(w, "peak        %s of %s GiB   %s\n", gib(d.Peak), gib(d.Capacity), verdict)
		fmt.Fprintf(w, "            %s GiB\n", causes(d.Memory))
	} else { // CPU devices share the host's memory, whose size the plan does not state
		fmt.Fprintf(w, "peak        %s per device\n", event.Size(d.Peak))
	}
	if d.Policy != "" {
		fmt.Fprintf(w, "precision   %s\n", d.Policy)
	}
	label := "time"
	for _, p := range largest(d.Parts) {
		fmt.Fprintf(w, "%-11s %5.1f %%  %s\n", label, 100*p.Seconds/d.Step, p.Name)
		label = ""
	}
	label = "would help"
	for _, h := range d.Helps[:min(3, len(d.Helps))] {
		fmt.Fprintf(w, "%-11s %+5.1f %%  %s\n", label, 100*(h.Step/d.Step-1), h.Change)
		label = ""
	}
	if d.Budget.Tokens > 0 && onGPUs { // nobody rents CPU devices for a run
		fmt.Fprintf(w, "%s tokens: %s, $%s at $%.2f per GPU-hour\n", text.tokens, days(d.Bill.Days),
			human.Amount(d.Bill.Money), d.Budget.Price)
	}
	for _, file := range d.Wrote {
		fmt.Fprintf(w, "wrote %s\n", file)
	}
	fmt.Fprintln(w, "predicted, not run")
}

// largest gives the causes that matter, the largest first.
func largest(parts []dryrun.Part) []dryrun.Part {
	list := lists.Filter(parts, func(p dryrun.Part) bool { return p.Seconds > 0 })
	lists.Sort(list, func(a, b dryrun.Part) int {
		return cmp.Compare(b.Seconds, a.Seconds)
	})
	return list[:min(len(list), shownParts)]
}
