package main

import (
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/step"
)

func (a *app) compile() *cobra.Command {
	job := deepwell.CompileJob{}
	var sets []string
	cmd := documented("compile", &cobra.Command{
		Args: one("file or model"),
		RunE: func(cmd *cobra.Command, args []string) error {
			job.Source = args[0]
			if job.Cluster == "" && filepath.Ext(job.Source) != ".json" {
				return usage(cmd, "compile needs a target: --cluster 8xb200")
			}
			// The defaults are for models; a file has its own.
			if !cmd.Flags().Changed("seq") {
				job.Seq = 0
			}
			if !cmd.Flags().Changed("batch") {
				job.Batch = 0
			}
			var err error
			if job.Flags, err = parseSets(cmd, sets); err != nil {
				return err
			}
			made, err := call(a, cmd, (*deepwell.Env).Compile, job)
			if made == nil || len(made.Stages) == 0 { // one that does not fit has a report all the same
				return err
			}
			if a.print(made); !a.json {
				for _, r := range made.Stages {
					if len(made.Stages) > 1 {
						fmt.Fprintln(a.stdout, r.Module)
					}
					fmt.Fprint(a.stdout, r)
				}
				if made.Census {
					fmt.Fprintln(a.stdout, "collectives match the plan: count, groups, tensors and bytes")
				}
				printRanks(a.stdout, made.Ranks)
			}
			return err
		},
	})
	flags := cmd.Flags()
	flags.StringVar(&job.Cluster, "cluster", "",
		"devices to compile for, such as 8xb200, 64xgb200 or 8xcpu")
	flags.Int64Var(&job.Seq, "seq", 2048,
		"tokens per sequence, for a model; less if its context is shorter")
	flags.Int64Var(&job.Batch, "batch", 1, "sequences per step, for a model")
	flags.StringVar(&job.Precision, "precision", "",
		"precision of linear-layer GEMMs: bf16, mxfp8, nvfp4, or a policy file")
	flags.StringArrayVar(&sets, "set", nil,
		"a compile option as NAME=VALUE, such as xla_gpu_enable_triton_gemm=true")
	flags.BoolVar(&job.WithoutCuDNN, "without-cudnn", false,
		"do not build cuDNN plans, to see what they add")
	return cmd
}

// parseSets reads NAME=VALUE; the value becomes a bool or a number where it looks like one.
func parseSets(cmd *cobra.Command, sets []string) (map[string]any, error) {
	flags := map[string]any{}
	for _, s := range sets {
		name, value, ok := strings.Cut(s, "=")
		if !ok || name == "" {
			return nil, usage(cmd, "--set takes NAME=VALUE, not %q", s)
		}
		flags[name] = parseValue(value)
	}
	return flags, nil
}

func parseValue(text string) any {
	switch strings.ToLower(text) {
	case "true":
		return true
	case "false":
		return false
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	if f, err := strconv.ParseFloat(text, 64); err == nil {
		return f
	}
	return text
}

// printRanks prints the memory of each pipeline rank; consecutive equal ranks are printed once.
func printRanks(w io.Writer, ranks []*step.Footprint) {
	for i := 0; i < len(ranks); {
		first, last := *ranks[i], i
		for last+1 < len(ranks) {
			next := *ranks[last+1]
			next.Rank, next.Largest = first.Rank, first.Largest // names have the rank in them
			if next != first {
				break
			}
			last++
		}
		fmt.Fprint(w, &first)
		if last > i {
			fmt.Fprintf(w, "            the same on ranks %d to %d\n", i+1, last)
		}
		i = last + 1
	}
}
