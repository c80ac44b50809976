package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/precision"
)

func (a *app) policy() *cobra.Command {
	var job deepwell.PolicyJob
	cmd := documented("policy", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usage(cmd, "policy takes a model and a precision; %d arguments were given", len(args))
			}
			job.Source, job.Precision = args[0], args[1]
			env, err := a.env()
			if err != nil {
				return err
			}
			p, share, err := env.Policy(cmd.Context(), job)
			a.finish()
			if err != nil {
				return err
			}
			return a.printPolicy(p, share, job)
		},
	})
	cmd.Flags().StringVarP(&job.Output, "output", "o", "", "write the policy to this file")
	return cmd
}

// printPolicy prints the rules in the order in which they apply.
func (a *app) printPolicy(p *precision.Policy, share map[dtype.Format]float64,
	job deepwell.PolicyJob) error {
	a.print(map[string]any{"policy": json.RawMessage(p.String()), "share": share})
	if a.json {
		return nil
	}
	var parts []string
	for _, f := range slices.Backward(precision.Formats()) {
		if share[f] > 0 {
			parts = append(parts, fmt.Sprintf("%.1f %% %s", 100*share[f], f))
		}
	}
	fmt.Fprintf(a.stdout, "%s in %s: linear-layer FLOPs are %s\n\n", job.Source, job.Precision,
		strings.Join(parts, ", "))
	err := a.table("linear layers\tlayers\tGEMMs\tformat\twhy", func(w io.Writer) {
		for _, r := range p.Rules {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", strings.Join(r.Linears, ", "), r.Span(p.Layers),
				cmp.Or(strings.Join(r.GEMMs, ", "), "all"), r.Format, r.Why)
		}
	})
	if err != nil {
		return err
	}
	if job.Output != "" {
		fmt.Fprintf(a.stdout, "wrote %s · next: precision = %[1]q in run.toml, or compile "+
			"--precision %[1]s\n",
			job.Output)
	}
	return nil
}
