package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/preflight"
)

func (a *app) preflight() *cobra.Command {
	job, peers := deepwell.PreflightJob{}, ""
	cmd := documented("preflight", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			switch len(args) {
			case 0:
			case 1:
				job.Plan = args[0]
			default:
				return usage(cmd, "preflight takes at most one plan; %d were given", len(args))
			}
			who := deepwell.TrainJob{Self: job.Self}
			if err := parsePeers(cmd, &who, peers); err != nil {
				return err
			}
			job.Peers, job.Self = who.Peers, who.Self
			done, err := call(a, cmd, (*deepwell.Env).Preflight, job)
			if done == nil {
				return err
			}
			if a.print(done); !a.json {
				printPreflight(a.stdout, done, job.Peers)
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.Int64Var(&job.Size, "size", 4096, "rows and columns of the matrices")
	flags.Float64Var(&job.Slow, "slow", 0.8,
		"speed, relative to the other GPUs or to the plan, below which one is slow")
	flags.StringVar(&peers, "peers", "", "addresses of all processes, as for train; they need a plan")
	flags.IntVar(&job.Self, "self", 0, "index of this process in --peers, as for train")
	flags.StringVar(&job.KeyFile, "key-file", "", "file of the secret that all --peers share")
	return cmd
}

func printPreflight(w io.Writer, r *preflight.Result, peers []string) {
	several := len(peers) > 1
	var versions []string
	for _, name := range []string{"plugin", "cuda_runtime", "cublas_lt", "cudnn", "nccl"} {
		if r.Versions[name] != "" {
			versions = append(versions, name+" "+r.Versions[name])
		}
	}
	fmt.Fprintf(w, "driver %s, CUDA %s · %s · Xid: %s\n", r.Driver, r.CUDA,
		strings.Join(versions, " · "), r.Xid)
	where := func(process, gpu int) string {
		switch {
		case several && gpu >= 0:
			return fmt.Sprintf("process %d, GPU %d", process, gpu)
		case several:
			return fmt.Sprintf("process %d", process)
		case gpu >= 0:
			return fmt.Sprintf("GPU %d", gpu)
		}
		return "host"
	}
	row := func(cells ...any) {
		line := fmt.Sprintf("%-16s %-16s %-22s %-4s %-8s %-13s %-10s %s", cells...)
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	row("gpu", "name", "free of memory", "ecc", "nvlinks", "MHz of max", "GEMM", "speed")
	for _, g := range r.GPUs {
		gemm, speed := "-", "-"
		if g.GEMMSeconds > 0 {
			gemm, speed = seconds(g.GEMMSeconds), fmt.Sprintf("%.2f", g.Speed)
		}
		row(where(g.Process, g.Number), g.Name, event.Size(g.FreeBytes)+" of "+event.Size(g.TotalBytes),
			g.ECC, fmt.Sprint(g.Links), fmt.Sprintf("%d of %d", g.ClockMHz, g.ClockMaxMHz), gemm, speed)
	}
	if r.SumSeconds > 0 {
		fmt.Fprintf(w, "all-reduce of %s over %d GPUs in %s\n", event.Size(r.SumBytes), len(r.GPUs),
			seconds(r.SumSeconds))
	}
	if r.GEMM != nil {
		fmt.Fprintf(w, "\n%-34s %-10s %-10s %s\n", "against the plan", "predicted", "measured", "share")
		for _, one := range append([]preflight.Rate{*r.GEMM}, r.Axes...) {
			name := fmt.Sprintf("%s of %d", one.Name, one.Size)
			if one.Bytes > 0 {
				name = fmt.Sprintf("all-reduce of %s, %s %d", event.Size(one.Bytes), one.Name, one.Size)
			}
			fmt.Fprintf(w, "%-34s %-10s %-10s %.2g\n", name, seconds(one.Predicted), seconds(one.Measured),
				one.Share())
		}
	}
	for _, p := range r.Problems {
		at := where(p.Process, p.GPU)
		if several {
			at += " at " + peers[p.Process]
		}
		fmt.Fprintf(w, "%s: %s\n  fix    %s\n", at, p.Text, p.Fix)
	}
}
