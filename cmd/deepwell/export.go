package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
)

func (a *app) export() *cobra.Command {
	job := deepwell.ExportJob{Getenv: a.getenv}
	var kind string
	var target quantizeFlags
	cmd := documented("export", &cobra.Command{
		Args: one("run, checkpoint or model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if job.Output == "" {
				return usage(cmd, "export needs an output folder: -o FOLDER")
			}
			if target.to != "" {
				o, err := target.options()
				if err != nil {
					return err
				}
				if job.Quantize = &o; kind != "" && kind != "bf16" {
					return usage(cmd, "--to writes weights that are not quantized as bf16, not %s: loaders "+
						"compute in bf16", kind)
				}
				kind = "bf16"
			}
			var err error
			if job.Type, err = dtype.Parse(kind); err != nil && kind != "" {
				return usage(cmd, "--dtype is f32, bf16 or f16, not %q", kind)
			}
			job.Source = args[0]
			return serve(a, cmd, (*deepwell.Env).Export, job, a.exported)
		},
	})
	flags := cmd.Flags()
	flags.StringVarP(&job.Output, "output", "o", "", "folder to write; it must be new or empty")
	flags.StringVar(&kind, "dtype", "",
		"element type of the weights: f32, bf16 or f16 (default: the model's, or f32)")
	flags.StringVar(&job.Tokenizer, "tokenizer", "",
		"folder to copy the tokenizer from (default: the run's or model's)")
	target.bind(cmd)
	return cmd
}

func (a *app) exported(done *deepwell.ExportResult) error {
	what, kind := done.Name, done.Type
	if r := done.Quantized; r != nil {
		kind = string(r.Format) + " for " + r.Layout.String()
		if err := r.WriteText(a.stdout); err != nil {
			return err
		}
		fmt.Fprintln(a.stdout)
	}
	if done.Step > 0 {
		what += fmt.Sprintf(", step %d", done.Step)
	}
	_, err := fmt.Fprintf(a.stdout, "%s · %s parameters · %s\nwrote %s · %s · %s\n", what,
		billions(done.Parameters), kind, done.Output, human.Count(done.Files, "file"),
		event.Size(done.Bytes))
	return err
}
