package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/kernels/table"
)

func (a *app) kernels() *cobra.Command {
	job := deepwell.KernelsJob{}
	cmd := documented("kernels", &cobra.Command{
		Args: one("plan or model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Source = args[0]
			if job.Cluster == "" && !strings.HasSuffix(job.Source, ".json") {
				return usage(cmd, "kernels needs a target: --cluster 8xb200")
			}
			return serve(a, cmd, (*deepwell.Env).Kernels, job, a.kernelTable)
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.Cluster, "cluster", "", "devices to compile for, such as 8xb200 or 64xgb300")
	flags.StringVar(&job.Precision, "precision", "",
		"precision of linear-layer GEMMs: bf16, mxfp8, nvfp4, or a policy file")
	flags.Int64Var(&job.Seq, "seq", 0, "tokens per sequence, for a model; 0 is 2048, or its context")
	return cmd
}

// smallRow is the share of a layer's time below which rows are printed as one.
const smallRow = 0.002

// kernelTable prints the kernels of each layer.
func (a *app) kernelTable(t *table.Table) error {
	fmt.Fprintf(a.stdout, "%s on %s in %s, %s tokens a sequence; compiled, not run: "+
		"times are modelled\n", t.Model, t.Cluster, t.Precision, human.Thousands(t.Seq))
	reasons := &reasonList{}
	for _, l := range t.Layers {
		fmt.Fprintf(a.stdout, "\n%s, one of %d rounds of the loop over layers\n", l.Pass, l.Rounds)
		err := a.table("  operation\tshape\tkernel\tprovider\tbytes\ttime\troofline\tunfused\twhy",
			func(w io.Writer) {
				for _, g := range l.Groups {
					printGroup(w, g, smallRow*l.Total.Seconds, reasons)
				}
				fmt.Fprintf(w, "all\t\t%d kernels\t\t%s\t%s\t\t%s\t%d kernels, %s\n", l.Total.Count,
					megabytes(l.Total.Bytes), human.Seconds(l.Total.Seconds), human.Seconds(l.Unfused.Seconds),
					l.Unfused.Count, megabytes(l.Unfused.Bytes))
			})
		if err != nil {
			return err
		}
	}
	fmt.Fprintln(a.stdout)
	reasons.print(a.stdout)
	for _, note := range t.Notes {
		fmt.Fprintln(a.stdout, note)
	}
	return nil
}

// printGroup prints the sums of a group, and its rows.
func printGroup(w io.Writer, g table.Group, small float64, reasons *reasonList) {
	dims := g.Dims
	if dims == "" {
		dims = "of the loop"
	}
	fmt.Fprintf(w, "%s\t\t%d kernels\t\t%s\t%s\t\t%s\t%d kernels, %s\n", dims, g.Total.Count,
		megabytes(g.Total.Bytes), human.Seconds(g.Total.Seconds), human.Seconds(g.Unfused.Seconds),
		g.Unfused.Count, megabytes(g.Unfused.Bytes))
	var rest table.Cost
	for _, r := range g.Rows {
		if r.Seconds < small {
			rest.Count, rest.Bytes = rest.Count+r.Count, rest.Bytes+r.Bytes
			rest.Seconds += r.Seconds
			continue
		}
		operation := r.Operation
		if r.Count > 1 {
			operation += fmt.Sprintf(", %d", r.Count)
		}
		fmt.Fprintf(w, "  %s\t%s\t%s\t%s\t%s\t%s\t%.0f %%\t\t%s\n", operation, r.Shape, r.Kernel,
			r.Provider, megabytes(r.Bytes), human.Seconds(r.Seconds), 100*r.Roofline, reasons.number(r.Why))
	}
	if rest.Count > 0 {
		fmt.Fprintf(w, "  %d smaller\t\t\t\t%s\t%s\t\t\t\n", rest.Count, megabytes(rest.Bytes),
			human.Seconds(rest.Seconds))
	}
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// A reasonList numbers reasons, which are long and few.
type reasonList struct{ list []string }

func (r *reasonList) number(why string) string {
	for i, known := range r.list {
		if known == why {
			return fmt.Sprintf("[%d]", i+1)
		}
	}
	r.list = append(r.list, why)
	return fmt.Sprintf("[%d]", len(r.list))
}

func (r *reasonList) print(w io.Writer) {
	for i, why := range r.list {
		fmt.Fprintf(w, "[%d] %s\n", i+1, why)
	}
}
