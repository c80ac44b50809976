package main

import (
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/internal/hostlist"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

func (a *app) train() *cobra.Command {
	job := deepwell.TrainJob{}
	example, profile, peers := false, "", ""
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
			var err error
			if job.Profile, err = parseSteps(profile); err != nil {
				return err
			}
			if err := parsePeers(cmd, &job, peers); err != nil {
				return err
			}
			outlivePipe()
			job.Stdin = os.Stdin
			// A crash inside of XLA ends the process by a signal, after which a launcher starts the run
			// again; Go's own status, 2, would be a wrong flag.
			debug.SetTraceback("crash")
			job.OnStall = func(err error) { os.Exit(a.fail(err)) } // stuck where nothing can be canceled
			return serve(a, cmd, (*deepwell.Env).Train, job, func(done *deepwell.TrainResult) error {
				if done.Rerun != nil {
					printRerun(a.stdout, done.Rerun)
				}
				return nil
			})
		},
	})
	flags := cmd.Flags()
	flags.StringArrayVar(&job.Set, "set", nil, "override a key of the recipe, such as steps=500")
	flags.StringVar(&job.Plan, "plan", "", "plan file that shards the model over several devices")
	flags.StringVar(&job.Device, "device", "",
		"cpu or gpu; by default GPUs where the host has them, CPU devices elsewhere")
	flags.StringVar(&peers, "peers", "",
		"addresses of all processes of the run, such as a:7000,b:7000 or node[01-64]:7000")
	flags.IntVar(&job.Self, "self", 0, "index of this process in --peers, from 0; by default the rank"+
		" that Slurm, Kubernetes or torchrun gives it")
	flags.StringVar(&job.KeyFile, "key-file", "",
		"file of 32 or more random bytes that all --peers share; optional on one host")
	flags.DurationVar(&job.Patience, "patience", 8*time.Second,
		"time without a sign of life after which a peer counts as lost; 30 times as long at the start")
	flags.IntVar(&job.Until, "until", 0, "stop after this step, with a checkpoint")
	flags.StringVar(&profile, "profile", "", "trace steps FROM:TO for ui.perfetto.dev")
	flags.StringVar(&job.Rerun, "rerun", "",
		"recompute the gradients of a rejected step, from the folder that the run wrote")
	flags.StringVar(&job.ReferenceRun, "reference-run", "",
		"write initial weights, batches and settings to a folder, to train the same run in PyTorch")
	flags.BoolVar(&example, "example", false, "print a recipe with every key explained")
	return cmd
}

// parsePeers reads --peers, and --self from the launcher's environment where it is not given.
func parsePeers(cmd *cobra.Command, job *deepwell.TrainJob, peers string) (err error) {
	if job.Peers, err = hostlist.Expand(peers); err != nil {
		return usage(cmd, "--peers %q: %v", peers, err)
	}
	if len(job.Peers) == 0 || cmd.Flags().Changed("self") {
		return nil
	}
	rank, variable, ok := hostlist.Rank(os.Getenv)
	switch {
	case !ok:
		return usage(cmd, "--peers names %d processes, and nothing tells which of them this is: --self",
			len(job.Peers))
	case rank >= len(job.Peers):
		return usage(cmd, "%s is %d, and --peers names %d processes", variable, rank, len(job.Peers))
	}
	job.Self = rank
	return nil
}

// shownParams is the number of gradients that a rerun prints: non-finite ones, then the largest.
const shownParams = 12

func printRerun(w io.Writer, r *train.RerunResult) {
	fmt.Fprintf(w, "step %d  loss %.6g  grad norm %.6g\n", r.Step, r.Loss, r.Norm)
	for i, p := range r.Params {
		if i == shownParams {
			fmt.Fprintf(w, "and %d more\n", len(r.Params)-i)
			break
		}
		note := ""
		if p.Bad > 0 {
			note = fmt.Sprintf("  %d elements are not finite", p.Bad)
		}
		fmt.Fprintf(w, "  %-24s grad norm %.4g%s\n", p.Name, p.Norm, note)
	}
}
