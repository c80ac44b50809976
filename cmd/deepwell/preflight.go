package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/preflight"
)

func (a *app) preflight() *cobra.Command {
	job := deepwell.PreflightJob{}
	cmd := documented("preflight", &cobra.Command{
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			done, err := call(a, cmd, (*deepwell.Env).Preflight, job)
			if done == nil {
				return err
			}
			if a.print(done); !a.json {
				printPreflight(a.stdout, done)
			}
			return err
		},
	})
	cmd.Flags().Int64Var(&job.Size, "size", 4096, "rows and columns of the matrices")
	cmd.Flags().Float64Var(&job.Slow, "slow", 0.8,
		"speed, relative to the other GPUs, below which one is slow")
	return cmd
}

func printPreflight(w io.Writer, r *preflight.Result) {
	fmt.Fprintln(w, "gpu  name              free of memory          ecc  GEMM       speed")
	for _, g := range r.GPUs {
		gemm, speed := "-", "-"
		if g.GEMMSeconds > 0 {
			gemm, speed = fmt.Sprintf("%.3g ms", 1e3*g.GEMMSeconds), fmt.Sprintf("%.2f", g.Speed)
		}
		fmt.Fprintf(w, "%-3d  %-16s  %-22s  %-3s  %-9s  %s\n", g.Number, g.Name,
			event.Size(g.FreeBytes)+" of "+event.Size(g.TotalBytes), g.ECC, gemm, speed)
	}
	if r.SumSeconds > 0 {
		fmt.Fprintf(w, "all-reduce of %s over %d GPUs in %.3g ms\n", event.Size(r.SumBytes), len(r.GPUs),
			1e3*r.SumSeconds)
	}
	for _, p := range r.Problems {
		where := "host"
		if p.GPU >= 0 {
			where = fmt.Sprintf("GPU %d", p.GPU)
		}
		fmt.Fprintf(w, "%s: %s\n  fix    %s\n", where, p.Text, p.Fix)
	}
}
