package report

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
)

// shownRows is how many rows of a table are shown, the newest.
const shownRows = 50

// experts draws the busiest and the idlest expert of all layers, by the mean load.
func (p page) experts(runs []*Run) {
	var list []svg.Series
	for i, r := range runs {
		if len(r.Experts) == 0 {
			continue
		}
		busy := svg.Series{Name: "busiest expert", Color: color(2 * i)}
		idle := svg.Series{Name: "idlest expert", Color: color(2*i + 1)}
		if len(runs) > 1 {
			busy.Name, idle.Name = r.Name+", "+busy.Name, r.Name+", "+idle.Name
		}
		for _, e := range r.Experts {
			x := float64(e.Step)
			busy.X, idle.X = append(busy.X, x), append(idle.X, x)
			busy.Y = append(busy.Y, lists.Max(e.Layers, 0,
				func(l event.ExpertLoad) float64 { return l.Busiest }))
			idle.Y = append(idle.Y, slices.Min(lists.Map(e.Layers,
				func(l event.ExpertLoad) float64 { return l.Idlest })))
		}
		list = append(list, busy, idle)
	}
	if len(list) == 0 {
		return
	}
	p.Head("Load of experts", "The busiest and the idlest expert of any layer, by the mean of its"+
		" layer: 1 is balanced.")
	p.Plot(svg.Plot{Label: "load of experts by step", X: "step", Y: "load by the mean", Series: list,
		Zero: true, Most: steps(runs)})
}

// rows writes a table of what happened in runs; a cell a column.
func (p page) rows(head, text string, columns []string, runs []*Run, cells func(*Run) [][]string) {
	var all [][]string
	for _, r := range runs {
		for _, row := range cells(r) {
			if len(runs) > 1 {
				row = append([]string{r.Name}, row...)
			}
			all = append(all, row)
		}
	}
	if len(all) == 0 {
		return
	}
	if len(runs) > 1 {
		columns = append([]string{"run"}, columns...)
	}
	if more := len(all) - shownRows; more > 0 {
		text += fmt.Sprintf(" The newest %d of %s.", shownRows, human.Thousands(int64(len(all))))
		all = all[more:]
	}
	p.Head(head, text)
	p.Add(`<div class="scroll"><table><tr>`)
	for _, c := range columns {
		p.Add("<th>%s", svg.Text(c))
	}
	p.Add("</tr>\n")
	for _, row := range all {
		p.Add("<tr>")
		for _, c := range row {
			p.Add("<td>%s", svg.Text(c))
		}
		p.Add("</tr>\n")
	}
	p.Add("</table></div>\n")
}

func (p page) rejected(runs []*Run) {
	p.rows("Rejected steps", "The state is what it was before them.",
		[]string{"step", "loss", "grad norm", "why"}, runs, func(r *Run) [][]string {
			return lists.Map(r.Rejected, func(e event.Rejected) []string {
				return []string{human.Thousands(int64(e.Step)), figure(float64(e.Loss)),
					figure(float64(e.GradNorm)), e.Why}
			})
		})
}

func (p page) precision(runs []*Run) {
	p.rows("Decisions about precision", "", []string{"step", "what", "why"}, runs,
		func(r *Run) [][]string {
			return lists.Map(r.Precision, func(e event.Precision) []string {
				return []string{human.Thousands(int64(e.Step)), e.What, e.Text}
			})
		})
}

func (p page) warnings(runs []*Run) {
	p.rows("Warnings", "", []string{"code", "what"}, runs, func(r *Run) [][]string {
		return lists.Map(r.Warnings, func(e event.Warning) []string {
			text := e.Text
			if e.Fix != "" {
				text += "; fix: " + e.Fix
			}
			return []string{e.Code, text}
		})
	})
}
