package autoplan

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// groups are the keys that Improve searches together, the others fixed to the plan's values.
var groups = [][]string{
	{"microbatch"},
	{"ep_kind", "ep_overlap"},
	{"recompute"},
	{"schedule", "virtual"},
	{"dp", "fsdp", "zero", "gather"},
	{"tp", "cp", "ep", "ep_kind", "ep_overlap", "pp", "dp", "fsdp", "zero", "gather", "schedule",
		"virtual"},
	{"tp", "cp", "ep", "ep_kind", "ep_overlap", "pp", "dp", "fsdp", "zero", "gather", "schedule",
		"virtual", "microbatch", "recompute"},
}

// Improve looks for plans that beat p, first near it and then further away: it frees one group of
// keys at a time and searches. step is p's time in seconds; changes that save less than 0.5 % are
// dropped.
func Improve(ctx context.Context, job Job, p *plan.Plan, step float64) ([]dryrun.Suggestion,
	error) {
	j, err := job.filled()
	if err != nil {
		return nil, err
	}
	j.Goal, j.Top, j.Batch, j.Devices = Time, 1, p.Batch, int(p.Devices())
	all := fixedOf(p)
	var list []dryrun.Suggestion
	for _, g := range groups {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c := j
		c.Fixed = maps.Clone(all)
		maps.DeleteFunc(c.Fixed, func(name, _ string) bool { return slices.Contains(g, name) })
		found := c.try(ctx)
		if found == nil {
			continue
		}
		e := estimate.Estimate{Step: found.step, High: found.high}
		if j.Correction.Apply(&e); e.Step > 0.995*step {
			continue
		}
		better := c.blank(p.Cluster)
		c.fill(better, found.meshOption, found.layoutOption, c.recomputeOptions()[found.recompute])
		change := differences(p, better)
		shown := func(h dryrun.Suggestion) bool { return h.Change == change }
		if change == "" || slices.ContainsFunc(list, shown) {
			continue
		}
		list = append(list, dryrun.Suggestion{Change: change, Step: e.Step, Peak: found.peak})
	}
	lists.Sort(list, func(a, b dryrun.Suggestion) int {
		return cmp.Compare(a.Step, b.Step)
	})
	return list, nil
}

// fixedOf returns a plan as --fix would spell it.
func fixedOf(p *plan.Plan) Fixed {
	n := func(x int64) string { return strconv.FormatInt(max(x, 1), 10) }
	ranks := p.DataParallelSize()
	f := Fixed{"tp": n(p.TP.Size), "cp": n(p.CP.Size), "ep": n(p.EP), "pp": n(p.PP.Size),
		"dp": n(p.DP), "fsdp": n(p.FSDP.Size), "recompute": "none",
		"microbatch": n(p.MicrobatchSequences() / ranks)}
	if p.FSDP.Size > 1 {
		f["zero"], f["gather"] = strconv.Itoa(p.FSDP.Zero), p.FSDP.Gather
	}
	if p.EP > 1 {
		f["ep_kind"], f["ep_overlap"] = cmp.Or(p.EPKind, "a2a"), strconv.FormatBool(p.EPOverlap)
	}
	if len(p.Slots) > 0 {
		words := lists.Map(p.Slots, func(x float64) string { return fmt.Sprint(x) })
		f["slots"] = strings.Join(words, "+")
	}
	if p.PP.Size > 1 {
		f["schedule"] = p.PP.Schedule
		if s, err := p.Schedule(); err == nil {
			f["virtual"] = strconv.Itoa(s.Virtual)
		}
	}
	if tags := lists.Map(p.Recompute, func(t ir.Tag) string { return string(t) }); len(tags) > 0 {
		f["recompute"] = strings.Join(tags, "+")
	}
	if len(p.Offload) > 0 {
		f["offload"] = strings.Join(p.Offload, "+")
	}
	return f
}

// differences lists what changes, at most five things; "" if nothing does.
func differences(p, better *plan.Plan) string {
	var words []string
	from, to := fixedOf(p), fixedOf(better)
	if p.TP.Sequence != better.TP.Sequence && better.TP.Size > 1 {
		words = append(words, map[bool]string{true: "sequence parallel",
			false: "no sequence parallel"}[better.TP.Sequence])
	}
	if p.CP.Size > 1 && better.CP.Size > 1 && (p.CP.Kind != better.CP.Kind ||
		p.CP.Balance != better.CP.Balance) {
		words = append(words, "cp "+better.CP.Kind)
		if better.CP.Balance {
			words = append(words, "balanced")
		}
	}
	for _, k := range keys {
		a, b := from[k.name], to[k.name]
		if a != b && b != "" {
			words = append(words, fmt.Sprintf("%s %s", k.name, b))
		}
	}
	text := strings.Join(words[:min(len(words), 5)], ", ")
	if len(words) > 5 {
		text += " …"
	}
	return text
}
