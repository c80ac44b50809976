package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
)

func (a *app) parity() *cobra.Command {
	job := deepwell.ParityJob{}
	var bounds []string
	cmd := documented("parity", &cobra.Command{
		Args: one("recipe"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Path = args[0]
			var err error
			if job.Bounds, err = parseBounds(bounds); err != nil {
				return err
			}
			outlivePipe()
			r, err := call(a, cmd, (*deepwell.Env).Parity, job)
			if r == nil {
				return err
			}
			if a.print(r); a.json {
				return err
			}
			r.Write(a.stdout)
			if job.Report != "" {
				fmt.Fprintf(a.stdout, "wrote %s\n", job.Report)
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.StringSliceVar(&job.Precisions, "precision", []string{"bf16", "mxfp8", "nvfp4"},
		"precisions to compare: bf16, mxfp8, nvfp4, or policy files")
	flags.IntVar(&job.Pairs, "pairs", 3, "runs of each precision, each with its own seed")
	flags.IntVar(&job.Branch, "branch", 0,
		"steps from one trained state while the learning rate decays to zero; 0 trains from scratch")
	flags.StringVar(&job.From, "from", "",
		"run folder to branch from (default: train the recipe's steps first)")
	flags.BoolVar(&job.Matched, "matched", false,
		"also run BF16 with random wgrad errors of the size that mxfp8 and nvfp4 make")
	flags.StringSliceVar(&bounds, "bound", nil,
		"PRECISION=PERCENT (default 0.25 for mxfp8 and 1 for nvfp4; with --branch 0.05 and 0.25)")
	flags.StringVar(&job.Report, "report", "", "write an HTML report with the curves to this file")
	flags.StringArrayVar(&job.Set, "set", nil, "override a key of the recipe, such as steps=500")
	return cmd
}
