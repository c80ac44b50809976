package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell/model"
)

// A modelRow is what the list of models says of one.
type modelRow struct {
	Name       string   `json:"name"`
	Aliases    []string `json:"aliases,omitempty"`
	Parameters int64    `json:"parameters,omitempty"`
	Active     int64    `json:"active,omitempty"`
	Layers     int64    `json:"layers,omitempty"`
	// TrainingFlops is the work of training on one token, in sequences of 8,192.
	TrainingFlops float64 `json:"training_flops,omitempty"`
	Note          string  `json:"note,omitempty"`
}

func (a *app) models() *cobra.Command {
	return &cobra.Command{
		Use:   "models [NAME]",
		Short: "List the models that are known by name, with their parameters and work",
		Example: "  deepwell models\n" +
			"  deepwell models llama3.1-8b --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usage(cmd, "models takes one name at most; %d were given", len(args))
			}
			list := model.Presets()
			if len(args) == 1 {
				p, err := model.Find(args[0])
				if err != nil {
					return err
				}
				list = []model.Preset{*p}
			}
			rows := make([]modelRow, len(list))
			for i, p := range list {
				rows[i] = newModelRow(p)
			}
			if a.json {
				a.print(map[string]any{"models": rows})
				return nil
			}
			w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "MODEL\tPARAMETERS\tACTIVE\tLAYERS\tGFLOP A TOKEN\tNOTE")
			for _, r := range rows {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", r.Name, billions(r.Parameters),
					billions(r.Active), whole(r.Layers), whole(int64(r.TrainingFlops/1e9)), r.Note)
			}
			return w.Flush()
		},
	}
}

func newModelRow(p model.Preset) modelRow {
	r := modelRow{Name: p.Name, Aliases: p.Aliases, Parameters: int64(p.Total),
		Active: int64(p.Active), Note: p.Note}
	if p.Config != nil {
		n := p.Config.Count()
		r.Parameters, r.Active, r.Layers = n.Total, n.Active, p.Config.Layers
		r.TrainingFlops = p.Config.Forward(8192).Training().Sum()
	}
	return r
}

func billions(n int64) string {
	switch {
	case n == 0:
		return "-"
	case n < 1e9:
		return fmt.Sprintf("%.0fM", float64(n)/1e6)
	case n < 1e11:
		return fmt.Sprintf("%.2fB", float64(n)/1e9)
	}
	return fmt.Sprintf("%.1fB", float64(n)/1e9)
}

func whole(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
