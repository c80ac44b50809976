package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
)

// A modelRow is a row of the model list.
type modelRow struct {
	Name       string   `json:"name"`
	Family     string   `json:"family,omitempty"`
	Aliases    []string `json:"aliases,omitempty"`
	Parameters int64    `json:"parameters,omitempty"`
	Active     int64    `json:"active,omitempty"`
	Layers     int64    `json:"layers,omitempty"`
	Hidden     int64    `json:"hidden,omitempty"`
	Heads      int64    `json:"heads,omitempty"`
	KVHeads    int64    `json:"key_heads,omitempty"`
	Context    int64    `json:"context,omitempty"`
	// TrainingFlops is the FLOPs per trained token, in sequences of 8,192.
	TrainingFlops float64 `json:"training_flops,omitempty"`
	Note          string  `json:"note,omitempty"`
}

func (a *app) models() *cobra.Command {
	return documented("models", &cobra.Command{
		RunE: func(cmd *cobra.Command, args []string) error {
			switch len(args) {
			case 0:
				return a.listModels()
			case 1:
				return a.showModel(cmd, args[0])
			}
			return usage(cmd, "models takes at most one name; %d were given", len(args))
		},
	})
}

func (a *app) listModels() error {
	rows := lists.Map(model.Presets(), newModelRow)
	return a.tell(map[string]any{"models": rows}, func() error {
		return writeModels(a.stdout, rows)
	})
}

// showModel shows a preset as capture does, or only its row if its sizes are not public.
func (a *app) showModel(cmd *cobra.Command, name string) error {
	p, err := model.Find(name)
	if err != nil || p.Config != nil {
		return a.show(cmd, deepwell.CaptureJob{Source: "preset:" + name, Getenv: a.getenv})
	}
	row := newModelRow(*p)
	return a.tell(map[string]any{"model": row}, func() error {
		return writeModels(a.stdout, []modelRow{row})
	})
}

func newModelRow(p model.Preset) modelRow {
	r := modelRow{Name: p.Name, Aliases: p.Aliases, Parameters: int64(p.Total),
		Active: int64(p.Active), Note: p.Note}
	if c := p.Config; c != nil {
		n := c.Count()
		r.Family, r.Parameters, r.Active = c.Arch, n.Total, n.Active
		r.Layers, r.Hidden, r.Heads, r.KVHeads = c.Layers, c.Hidden, c.Heads, c.KVHeads
		r.Context = c.Context
		r.TrainingFlops = c.Forward(8192).Training().Sum()
	}
	return r
}

// writeModels writes a table, with the family above its models, and notes below. Numbers stand at
// the right.
func writeModels(w io.Writer, rows []modelRow) error {
	const form = "%-24s %10s %8s %6s %6s %7s %8s"
	var b strings.Builder
	var notes []string
	fmt.Fprintf(&b, form+"\n", "model", "parameters", "active", "layers", "hidden", "heads", "context")
	for i, r := range rows {
		if family := r.Family; i == 0 || family != rows[i-1].Family {
			if family == "" {
				family = "sizes not public"
			}
			fmt.Fprintf(&b, "%s\n", family)
		}
		fmt.Fprintf(&b, form, "  "+r.Name, billions(r.Parameters), active(r), whole(r.Layers),
			whole(r.Hidden), heads(r), whole(r.Context))
		if r.Note != "" {
			if !slices.Contains(notes, r.Note) {
				notes = append(notes, r.Note)
			}
			fmt.Fprintf(&b, "  [%d]", slices.Index(notes, r.Note)+1)
		}
		b.WriteByte('\n')
	}
	for i, note := range notes {
		fmt.Fprintf(&b, "\n[%d] %s", i+1, note)
	}
	if len(notes) > 0 {
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// active is empty where every token uses all parameters.
func active(r modelRow) string {
	if r.Active == r.Parameters {
		return ""
	}
	return billions(r.Active)
}

// heads is the number of query heads, and of key heads where it differs.
func heads(r modelRow) string {
	if r.KVHeads == r.Heads {
		return whole(r.Heads)
	}
	return fmt.Sprintf("%d/%d", r.Heads, r.KVHeads)
}

func billions(n int64) string {
	if n == 0 {
		return "-"
	}
	return human.Parameters(n, 0)
}

func whole(n int64) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
