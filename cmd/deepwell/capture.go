package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
)

func (a *app) capture() *cobra.Command {
	job := deepwell.CaptureJob{Getenv: a.getenv}
	cmd := &cobra.Command{
		Use:   "capture MODEL",
		Short: "Tell what a model is: blocks, parameters, work, memory, and what its files hold",
		Long: "Capture reads the configuration of a model and the headers of its weights, compares\n" +
			"the two, and tells what it found. A model is a preset (see: deepwell models), a folder with\n" +
			"config.json and *.safetensors, a config.json alone, or hf:ORG/NAME, which is looked for\n" +
			"in the Hugging Face cache; nothing is downloaded. -o writes the graph of the model.",
		Example: "  deepwell capture llama3.1-8b --seq 8192\n" +
			"  deepwell capture hf:Qwen/Qwen3-0.6B\n" +
			"  deepwell capture ./my-model -o model.dw",
		Args: one("model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Source = args[0]
			return a.show(cmd, job)
		},
	}
	flags := cmd.Flags()
	flags.Int64Var(&job.Seq, "seq", 0, "tokens in a sequence (8192, or the context if shorter)")
	flags.Int64Var(&job.Batch, "batch", 1, "sequences in a batch of the graph")
	flags.BoolVar(&job.Scan, "scan", false,
		"look for NaN and Inf in weights of more than 4 GiB, too")
	flags.StringVarP(&job.Graph, "output", "o", "", "also write the graph of the model to this file")
	return cmd
}

// show captures a model and prints it.
func (a *app) show(cmd *cobra.Command, job deepwell.CaptureJob) error {
	if job.Seq < 0 || job.Batch < 0 {
		return usage(cmd, "sequences and batches are not negative")
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
