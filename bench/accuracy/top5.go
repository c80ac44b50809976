package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// A placing is where the plan that NVIDIA publishes stands among those that a search finds for the
// same model, cluster and batch.
type placing struct {
	row    *bridgeRow
	listed int     // place of the plan with its sizes of axes among all that were found; 0 if none
	mesh   int     // its place when plans of the same work count once
	exact  int     // the same, if it has NVIDIA's number of microbatches too
	best   float64 // seconds of the best plan that was found
	fifth  float64 // of the last one that counts
	own    float64 // seconds of NVIDIA's
	peak   int64   // bytes of NVIDIA's, with what it has to recompute
	fits   string  // what NVIDIA's has to recompute or offload in order to fit; no if nothing helps
}

// first is how many plans count as the first ones.
const first = 5

// placings makes a case of each model, GPU and format, at the last release that measured it.
func placings(ctx context.Context, rows []bridgeRow, fitted *price.Bridge) ([]placing, error) {
	last := map[string]*bridgeRow{}
	for i := range rows {
		r := &rows[i]
		key := fmt.Sprint(r.family, r.run.GPU, r.run.Precision)
		if was := last[key]; !r.check && (was == nil || was.release < r.release) {
			last[key] = r
		}
	}
	var list []placing
	for _, r := range last {
		list = append(list, placing{row: r})
	}
	slices.SortFunc(list, func(a, b placing) int { return cmp.Compare(a.row.id, b.row.id) })
	for i := range list {
		if err := list[i].search(ctx, fitted); err != nil {
			return nil, fmt.Errorf("%s: %w", list[i].row.id, err)
		}
	}
	return list, nil
}

// search plans the case and looks for NVIDIA's plan among what is found.
func (k *placing) search(ctx context.Context, fitted *price.Bridge) error {
	r := k.row
	prof := fitted.Profile(r.run)
	var err error
	if k.own, k.peak, k.fits, err = r.smallest(prof); err != nil {
		return err
	}
	job := autoplan.Job{Model: r.family, Config: r.config, Cluster: r.cluster, Profile: prof,
		Seq: r.plan.Seq, Batch: r.plan.Batch, Precisions: []dtype.Format{r.run.Precision},
		Devices: r.cluster.Count, Top: 2 * first,
		Capacity: r.cluster.GPU.UsableBytes}
	best := map[string]autoplan.Choice{}
	for _, fixed := range asMegatron(r) {
		job.Fixed = fixed
		found, err := autoplan.Search(ctx, job)
		if e, ok := errors.AsType[*diag.Error](err); ok && e.Code == diag.PlanNoFit {
			continue
		}
		if err != nil {
			return err
		}
		for _, c := range found.Choices {
			key := sizes(c.Plan, max(c.Plan.EP, 1))
			if was, ok := best[key]; !ok || c.Step < was.Step {
				best[key] = c
			}
		}
	}
	k.place(slices.SortedFunc(maps.Values(best), func(a, b autoplan.Choice) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Peak, b.Peak))
	}))
	return nil
}

// place finds NVIDIA's plan in a list of the best of each mesh.
func (k *placing) place(list []autoplan.Choice) {
	r := k.row
	own := sizes(r.plan, max(r.options.ExpertRanks, 1))
	places := map[string]int{}
	for i, c := range list {
		class := work(c.Plan)
		if places[class] == 0 {
			places[class] = len(places) + 1
			if len(places) <= first {
				k.fifth = c.Step
			}
		}
		at := places[class]
		if i == 0 {
			k.best = c.Step
		}
		if sizes(c.Plan, max(c.Plan.EP, 1)) == own {
			k.listed, k.mesh = i+1, at
			if c.Plan.Microbatches == r.plan.Microbatches {
				k.exact = at
			}
		}
	}
}

// work identifies what a device computes in a microbatch. A plan with twice the cp and twice the
// sequences per microbatch has the same work, and only more communication: both count as one plan,
// of which the better is listed first.
func work(p *plan.Plan) string {
	ranks, zero := p.DataParallelSize(), p.FSDP.Zero
	if p.FSDP.Size <= 1 { // nothing to shard, as with an optimizer that shards only its state
		zero = 1
	}
	return fmt.Sprintf("tp%d pp%d ep%d zero%d %g rows", p.TP.Size, p.PP.Size, p.EP, zero,
		float64(p.MicrobatchSequences()/ranks)/float64(max(p.CP.Size, 1)))
}

// sizes identifies a plan: the sizes of its axes, and whether parameters are sharded.
func sizes(p *plan.Plan, ep int64) string {
	cut := ""
	if p.FSDP.Zero == 3 && p.FSDP.Size > 1 {
		cut = " fsdp"
	}
	return fmt.Sprintf("tp%d cp%d pp%d ep%d%s", max(p.TP.Size, 1), max(p.CP.Size, 1),
		max(p.PP.Size, 1), ep, cut)
}

// asMegatron is what Megatron can run of all that a search knows, as things to fix: a distributed
// optimizer, 1F1B and interleaved 1F1B with stages that it lays out, which are equal when
// embedding and loss count as layers or when they do not, or the stages of a layout that the
// recipe knows; and FSDP without a pipeline for models without experts in bf16 and fp8, as in the
// recipes.
func asMegatron(r *bridgeRow) []autoplan.Fixed {
	list := []autoplan.Fixed{{"pp": "1", "zero": "1"}}
	if !r.run.Experts && (r.run.Precision == dtype.FormatFP8 || r.run.Precision == dtype.FormatBF16) {
		list = append(list, autoplan.Fixed{"pp": "1", "zero": "3", "gather": "layer"})
	}
	layers := r.config.Layers
	for pp := int64(2); pp <= min(layers, int64(r.cluster.Count)); pp *= 2 {
		for _, v := range []int64{1, 2, 3, 4, 5, 6, 8} {
			n, name := pp*v, "interleaved"
			if v == 1 {
				name = "1f1b"
			}
			even := n <= layers+2 && (layers%n == 0 || (layers+2)%n == 0)
			if r.config.MLA != nil {
				even = n == 16 || v == 1 && (pp == 4 || pp == 8) || pp == 4 && v == 2
			}
			if even {
				list = append(list, autoplan.Fixed{"pp": fmt.Sprint(pp), "zero": "1",
					"schedule": name, "virtual": fmt.Sprint(v)})
			}
		}
	}
	return list
}

// smallest prices a row's plan with the least of what the recipes recompute and offload that makes
// it fit. Rows do not say what they had.
func (r *bridgeRow) smallest(prof *price.Profile) (step float64, peak int64, how string,
	err error) {
	e := r.pricer.Under(prof)
	for _, v := range []struct {
		how     string
		tags    []ir.Tag
		offload []string
	}{{"nothing", nil, nil}, {"norms", []ir.Tag{ir.Norm}, nil},
		{"modules", []ir.Tag{ir.Attn}, nil}, {"modules", []ir.Tag{ir.Attn, ir.Experts}, nil},
		{"offload", nil, []string{"activations"}}} {
		p := *r.plan
		p.Recompute, p.Offload = v.tags, v.offload
		est, err := e.Price(&p)
		if err != nil {
			return 0, 0, "", err
		}
		if step, peak, how = est.Step, est.Peak, v.how; peak <= r.cluster.GPU.UsableBytes {
			return step, peak, how, nil
		}
	}
	return step, peak, "no", nil
}

func (k *placing) line(sep string) string {
	r, p := k.row, k.row.plan
	return strings.Join([]string{r.id, r.family, r.run.GPU, string(r.run.Precision),
		sizes(p, max(r.options.ExpertRanks, 1)), fmt.Sprint(k.listed), fmt.Sprint(k.mesh),
		fmt.Sprint(k.exact),
		fmt.Sprintf("%+.1f", 100*(k.own/k.best-1)), fmt.Sprintf("%+.1f", 100*(k.own/k.fifth-1)),
		fmt.Sprintf("%.0f of %.0f", gib(k.peak), gib(r.cluster.GPU.UsableBytes)), k.fits}, sep)
}

func gib(bytes int64) float64 { return float64(bytes) / (1 << 30) }

// verdicts is how many rows that ran are estimated to fit, by what they have to recompute or keep
// on the host.
func verdicts(rows []bridgeRow, fitted *price.Bridge) (map[string]int, error) {
	count := map[string]int{}
	for i := range rows {
		_, _, how, err := rows[i].smallest(fitted.Profile(rows[i].run))
		if err != nil {
			return nil, err
		}
		count[how]++
	}
	return count, nil
}

const topAbout = `
## NVIDIA's own plans

For each model, GPU and precision of Megatron-Bridge, at its last release: where NVIDIA's plan
stands among those that package autoplan finds for the same devices and batch, under the profile
that is fitted on all rows. Goal: among the first five in at least 80 %%. The search is asked for
what Megatron runs: a distributed optimizer, 1F1B and interleaved 1F1B with stages that it lays out
evenly, embedding and loss counted as layers, or by a layout that the recipe knows, ring
attention along cp, FSDP for models without experts in bf16 and fp8, and the whole GPU as the limit
(several of NVIDIA's plans are above the 95 %% of it that a search takes by itself).
"Place" counts plans of the same work once, such as cp2 with two rows instead
of cp1 with one, whose times differ by less than 1 %%; "listed" what a search tells, which
has such plans once. A plan matches by
tp, cp, pp, ep and fsdp; "exact" by the microbatches as well. What was chosen with all rows in view:
these rules, and what the memory of the recipes is made of, which is read from their source and not
fitted. 0 in a column of places means that no such plan was found. "Behind best" and "fifth" compare
the estimate of NVIDIA's plan, with its own microbatches, with the best and the fifth plan found: a
plan can match the best one's axes and be far behind it with other microbatches, and negative means
faster. "Needs" is what it has to recompute or offload in order to fit.

**%d of %d** among the first five (%d listed, %d exact); %d are estimated within 2 %% of the fifth.

| row | model | GPU | type | plan | listed | place | exact | %% behind best | fifth | GiB | needs |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
`

// topSection tells of NVIDIA's plans, and whether all rows that ran are estimated to fit.
func topSection(uint64) (*section, error) {
	rows, err := mbridge()
	if err != nil {
		return nil, err
	}
	fitted := price.MegatronBridge()
	list, err := placings(context.Background(), rows, fitted)
	if err != nil {
		return nil, err
	}
	var listed, mesh, exact, near int
	var lines strings.Builder
	for i := range list {
		k := &list[i]
		among := func(place int) int {
			if place > 0 && place <= first {
				return 1
			}
			return 0
		}
		listed, mesh, exact = listed+among(k.listed), mesh+among(k.mesh), exact+among(k.exact)
		if k.own <= 1.02*k.fifth {
			near++
		}
		fmt.Fprintf(&lines, "| %s |\n", k.line(" | "))
	}
	count, err := verdicts(rows, fitted)
	if err != nil {
		return nil, err
	}
	head := fmt.Sprintf(topAbout, mesh, len(list), listed, exact, near)
	fit := fmt.Sprintf("\nAll %d rows ran. Estimated to fit on the whole GPU: %d as they are, %d "+
		"with norms\nrecomputed, %d with modules (latent projections, activations of experts), %d "+
		"with activations on\nthe host, as FSDP recipes have it; not at all: %d.\n", len(rows),
		count["nothing"], count["norms"], count["modules"], count["offload"], count["no"])
	page := head + lines.String() + fit
	return &section{name: "nvidia's plans", text: page, page: page}, nil
}
