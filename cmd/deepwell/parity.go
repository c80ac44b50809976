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
		"what to compare: bf16, mxfp8, nvfp4, or files of policies")
	flags.IntVar(&job.Pairs, "pairs", 3, "runs of each precision, with a seed of their own each")
	flags.IntVar(&job.Branch, "branch", 0,
		"steps that runs make from one trained state, with the rate to zero; 0 starts from scratch")
	flags.StringVar(&job.From, "from", "",
		"the folder of a run to branch from; else the recipe's steps are trained for it")
	flags.BoolVar(&job.Matched, "matched", false,
		"also BF16 with random errors on weight gradients, as large as those of mxfp8 and nvfp4")
	flags.StringSliceVar(&bounds, "bound", nil,
		"PRECISION=PERCENT, if not 0.25 and 1 for mxfp8 and nvfp4, 0.05 and 0.25 of branches")
	flags.StringVar(&job.Report, "report", "", "where a page with curves goes, such as parity.html")
	flags.StringArrayVar(&job.Set, "set", nil, "a key of the recipe as KEY=VALUE, such as steps=500")
	return cmd
}
