package main

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/quantize"
)

func (a *app) quantize() *cobra.Command {
	job := deepwell.QuantizeJob{Getenv: a.getenv}
	var target quantizeFlags
	cmd := documented("quantize", &cobra.Command{
		Args: one("model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if job.Output == "" {
				return usage(cmd, "quantize needs an output folder: -o FOLDER")
			}
			if target.to == "" {
				return usage(cmd, "quantize needs a format: --to mxfp8 or --to nvfp4")
			}
			var err error
			if job.Options, err = target.options(); err != nil {
				return err
			}
			job.Source = args[0]
			return serve(a, cmd, (*deepwell.Env).Quantize, job, func(r *quantize.Report) error {
				return a.quantized(r, job.Output)
			})
		},
	})
	flags := cmd.Flags()
	flags.StringVarP(&job.Output, "output", "o", "",
		"folder to write: new, empty, or left by the same command when it stopped")
	flags.StringVar(&job.Policy, "policy", "",
		"training policy file: layers in bf16 there are not quantized")
	target.bind(cmd)
	return cmd
}

// quantizeFlags are the flags of quantization, shared by quantize and export.
type quantizeFlags struct {
	to, layout string
	skip       []string
	inputAmax  float64
}

func (n *quantizeFlags) bind(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&n.to, "to", "", "format of the weights: mxfp8 or nvfp4")
	flags.StringVar(&n.layout, "layout", "compressed-tensors",
		"checkpoint layout: compressed-tensors or modelopt")
	flags.StringArrayVar(&n.skip, "skip", nil,
		"layer to leave as it is, by name, with * as a wildcard; repeatable")
	flags.Float64Var(&n.inputAmax, "input-amax", 0,
		"largest activation magnitude; NVFP4 then quantizes activations too")
}

func (n *quantizeFlags) options() (o quantize.Options, err error) {
	if o.To, err = quantize.ParseFormat(n.to); err != nil {
		return o, err
	}
	if o.Layout, err = quantize.ParseLayout(n.layout); err != nil {
		return o, err
	}
	o.Skip, o.InputAmax = n.skip, float32(min(n.inputAmax, math.MaxFloat32))
	return o, nil
}

func (a *app) quantized(r *quantize.Report, output string) error {
	if err := r.WriteText(a.stdout); err != nil {
		return err
	}
	_, err := fmt.Fprintf(a.stdout, "\nwrote %s · %s for %s · %s · %s, %.0f %% of %s\n", output,
		r.Format, r.Layout, human.Count(len(r.Files), "file"), event.Size(r.BytesOut),
		100*float64(r.BytesOut)/float64(max(r.BytesIn, 1)), event.Size(r.BytesIn))
	return err
}
