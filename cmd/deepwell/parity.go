package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
)

func (a *app) parity() *cobra.Command {
	job := deepwell.ParityJob{}
	cmd := &cobra.Command{
		Use:   "parity RUN.toml",
		Short: "Compare precisions by the loss that a recipe reaches with them",
		Long: "Parity trains the same in several precisions: same seeds, same rows, same order.\n" +
			"The gap is the mean loss of the last 50 steps against BF16's, and a verdict holds its\n" +
			"95 % limit over all pairs to a bound. BF16 runs twice, the second time with weights\n" +
			"changed by one part in 100,000: small runs drift apart by themselves, and this\n" +
			"shows by how much.\n\n" +
			"From scratch, a pair needs a rate at which the null stays below a fifth of the bound. With\n" +
			"--branch, pairs go on from one trained state while the rate falls to zero, which resolves\n" +
			"gaps a hundred times smaller. The command ends with status 4 if a bound is missed or if the\n" +
			"runs do not show that it is met.",
		Example: "  deepwell parity run.toml --precision bf16,mxfp8,nvfp4 --report parity.html\n" +
			"  deepwell parity run.toml --branch 120 --from run --pairs 5\n" +
			"  deepwell parity run.toml --precision nvfp4,policy.json --bound policy.json=0.5",
		Args: one("recipe"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Path = args[0]
			outlivePipe()
			r, err := call(a, cmd, (*deepwell.Env).Parity, job)
			if r == nil {
				return err
			}
			if a.json {
				a.print(r)
				return err
			}
			r.Write(a.stdout)
			if job.Report != "" {
				fmt.Fprintf(a.stdout, "wrote %s\n", job.Report)
			}
			return err
		},
	}
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
	flags.StringSliceVar(&job.Bounds, "bound", nil,
		"PRECISION=PERCENT, if not 0.25 and 1 for mxfp8 and nvfp4, 0.05 and 0.25 of branches")
	flags.StringVar(&job.Report, "report", "", "where a page with curves goes, such as parity.html")
	flags.StringArrayVar(&job.Set, "set", nil, "a key of the recipe as KEY=VALUE, such as steps=500")
	return cmd
}
