package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
)

func (a *app) capture() *cobra.Command {
	job := deepwell.CaptureJob{Getenv: a.getenv}
	cmd := documented("capture", &cobra.Command{
		Args: one("model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Source = args[0]
			return a.show(cmd, job)
		},
	})
	flags := cmd.Flags()
	flags.Int64Var(&job.Seq, "seq", 0,
		"tokens per sequence (default 8192, or the model's context if shorter)")
	flags.Int64Var(&job.Batch, "batch", 1, "sequences per batch in the graph")
	flags.BoolVar(&job.Scan, "scan", false,
		"also scan weights larger than 4 GiB for NaN and Inf")
	flags.StringVarP(&job.Graph, "output", "o", "", "also write the model's graph to this file")
	return cmd
}

// show captures a model and prints it.
func (a *app) show(cmd *cobra.Command, job deepwell.CaptureJob) error {
	if job.Seq < 0 || job.Batch < 0 {
		return usage(cmd, "--seq and --batch must not be negative")
	}
	s, err := call(a, cmd, (*deepwell.Env).Capture, job)
	if err != nil {
		return err
	}
	return a.tell(map[string]any{"model": s}, func() error {
		if err := s.WriteText(a.stdout); err != nil || job.Graph == "" {
			return err
		}
		_, err := fmt.Fprintf(a.stdout, "wrote %s\n", job.Graph)
		return err
	})
}
