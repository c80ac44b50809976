package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

func (a *app) train() *cobra.Command {
	job := deepwell.TrainJob{}
	example := false
	cmd := documented("train", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if example {
				_, err := io.WriteString(a.stdout, recipe.Example())
				return err
			}
			if len(args) != 1 {
				return usage(cmd, "train takes one recipe; %d were given", len(args))
			}
			job.Path = args[0]
			outlivePipe()
			job.OnStall = func(err error) { os.Exit(a.fail(err)) } // stuck where nothing can be canceled
			return serve(a, cmd, (*deepwell.Env).Train, job, func(done *deepwell.TrainResult) error {
				if done.Replay != nil {
					printReplay(a.stdout, done.Replay)
				}
				return nil
			})
		},
	})
	flags := cmd.Flags()
	flags.StringArrayVar(&job.Set, "set", nil, "a key of the recipe as KEY=VALUE, such as steps=500")
	flags.StringVar(&job.Plan, "plan", "", "a plan that spreads the model over several devices")
	flags.StringSliceVar(&job.Peers, "peers", nil,
		"the addresses of all processes of a run, such as a:7000,b:7000, which share a plan's stages")
	flags.IntVar(&job.Self, "self", 0, "which of the --peers this process is, from 0")
	flags.StringVar(&job.KeyFile, "key-file", "",
		"32 random bytes or more that all --peers share; without it they are on one host")
	flags.DurationVar(&job.Patience, "patience", 8*time.Second,
		"how long a process of --peers may be silent; at the start they wait 30 times as long")
	flags.IntVar(&job.Until, "until", 0, "pause after this step, with a checkpoint")
	flags.StringVar(&job.Profile, "profile", "", "trace the steps FROM:TO, for ui.perfetto.dev")
	flags.StringVar(&job.Replay, "replay", "",
		"compute the gradients of a rejected step again, from the folder that the run wrote")
	flags.StringVar(&job.ReferenceRun, "handover", "",
		"write first weights, batches and settings into a folder, for another program to train the same")
	flags.BoolVar(&example, "example", false, "print a recipe with every key explained")
	return cmd
}

// shownParams is how many gradients a replay shows: those that are not finite, and the largest.
const shownParams = 12

func printReplay(w io.Writer, r *train.Replay) {
	fmt.Fprintf(w, "step %d  loss %.6g  |g| %.6g\n", r.Step, r.Loss, r.Norm)
	for i, p := range r.Params {
		if i == shownParams {
			fmt.Fprintf(w, "and %d more\n", len(r.Params)-i)
			break
		}
		note := ""
		if p.Bad > 0 {
			note = fmt.Sprintf("  %d elements are not finite", p.Bad)
		}
		fmt.Fprintf(w, "  %-24s |g| %.4g%s\n", p.Name, p.Norm, note)
	}
}
