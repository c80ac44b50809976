package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/gpubench"
	"github.com/deepwell/deepwell/internal/human"
)

func (a *app) bench() *cobra.Command {
	job := deepwell.BenchJob{}
	cmd := documented("bench", &cobra.Command{
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 || !slices.Contains(gpubench.Kinds(), args[0]) {
				return usage(cmd, "bench takes what to measure and a model: bench %s MODEL",
					strings.Join(gpubench.Kinds(), "|"))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Kind, job.Source = args[0], args[1]
			return serve(a, cmd, (*deepwell.Env).Bench, job, a.benchTable)
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.Precision, "precision", "", "precision of GEMMs: bf16, mxfp8 or nvfp4")
	flags.Int64Var(&job.Seq, "seq", 0, "tokens; 0 is 2048, or the model's context")
	flags.StringVar(&job.Torch, "torch", "", "a Python with torch, to compare with")
	return cmd
}

// benchTable prints the times.
func (a *app) benchTable(r *gpubench.Report) error {
	fmt.Fprintf(a.stdout, "%s on %s in %s; measured, the best of several\n\n", r.Model, r.GPU,
		r.Precision)
	err := a.table("operation\tshape\ttime\tof bf16 peak\tno own kernels\tcost model\ttorch.compile\t",
		func(w io.Writer) {
			for _, row := range r.Rows {
				share := "-"
				if row.Roofline > 0 {
					share = fmt.Sprintf("%.0f %%", 100*row.Roofline)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", row.Operation, row.Shape,
					human.Seconds(row.Own), share, timeOrNone(row.Plain), timeOrNone(row.Modelled),
					timeOrNone(row.Torch), row.Notes)
			}
		})
	fmt.Fprintf(a.stdout, "\ntorch.compile: %s\n", r.Torch)
	return err
}

func timeOrNone(seconds float64) string {
	if seconds == 0 {
		return "-"
	}
	return human.Seconds(seconds)
}
