package main

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// A sweepRow is a run of nanotron's sweep over plans on H100. What is fitted on it is about that
// code on that cluster, so that no profile comes of it; it shows whether plans come out in order.
type sweepRow struct {
	sample
	cell       string // rows that compete: a model on a number of hosts
	hosts      int64
	dp, tp, pp int64
	mbs, acc   int64
	zero       int64
	longest    int64 // layers of the longest stage
	tokens     float64
	clean      bool
	pricer     *estimate.Estimator
}

// crosses says that a pipeline goes over several hosts.
func (s *sweepRow) crosses() bool { return s.pp > 1 && s.hosts > 1 }

// nanotron reads the sweep: 1,728 runs of four dense models on 1 to 64 hosts.
func nanotron() ([]sweepRow, error) {
	rows, err := table("published_runs_nanotron_h100.csv", "nano-")
	if err != nil {
		return nil, err
	}
	known, err := models()
	if err != nil {
		return nil, err
	}
	base, err := price.Find("megatron")
	if err != nil {
		return nil, err
	}
	list := make([]sweepRow, len(rows))
	for i, r := range rows {
		s := &list[i]
		if err := s.read(r, known[r["model"]].dense()); err != nil {
			return nil, err
		}
		e, err := estimate.New(s.config, s.cluster, base)
		if err != nil {
			return nil, err
		}
		s.pricer = e.With(s.options)
	}
	sift(list)
	return list, nil
}

func (s *sweepRow) read(r record, c *model.Config) error {
	cluster, err := machine.ParseCluster(r["gpus"] + "xh100")
	if err != nil {
		return err
	}
	// Counts of parameters say which models share the table of embeddings with the head.
	c.Tied = r["model"] == "nanotron-1.34b" || r["model"] == "nanotron-3.57b"
	s.cell, s.hosts = r["model"]+" on "+r["nodes"]+" hosts", r.int("nodes")
	s.dp, s.tp, s.pp = r.int("dp"), r.int("tp"), r.int("pp")
	s.mbs, s.acc, s.zero = r.int("mbs"), r.int("grad_acc"), r.int("zero_stage")
	p := megatronPlan(cluster, r.int("seq_len"), r.int("gbs"), s.acc, s.dp, s.tp, 1, s.pp)
	if s.zero == 0 {
		p.FSDP, p.DP = plan.FSDP{Size: 1}, s.dp
	}
	var o estimate.Options
	s.longest = c.Layers
	if s.pp > 1 {
		o.Layers = sweepLayers(c, s.pp)
		s.longest = slices.Max(o.Layers)
	}
	s.tokens = r.float("gbs") * r.float("seq_len")
	s.sample = sample{id: r["id"], family: r["model"], layout: r["id"], weight: 1, config: c,
		cluster: cluster, plan: p, options: o, seconds: s.tokens / r.float("tokens_per_s_total")}
	return nil
}

// sift marks what is clean: runs on fewer than 64 hosts that are not of the second population,
// which takes about a second for each microbatch whatever the model. The rule looks at what was
// measured, so that results are given with and without it.
func sift(list []sweepRow) {
	type key struct {
		family      string
		tp, pp, mbs int64
	}
	each := func(s *sweepRow) float64 { return s.seconds / float64(s.acc+s.pp-1) }
	least := map[key]float64{}
	for i := range list {
		s := &list[i]
		k := key{s.family, s.tp, s.pp, s.mbs}
		if v, ok := least[k]; !ok || each(s) < v {
			least[k] = each(s)
		}
	}
	for i := range list {
		s := &list[i]
		t := each(s)
		slow := t > 2*least[key{s.family, s.tp, s.pp, s.mbs}] && t > 0.35 && s.acc >= 4
		s.clean = !slow && s.hosts < 64
	}
}

// sweepLayers lays layers out as nanotron does: a layer goes to the next stage once the parameters
// up to it pass the share of the stages before.
func sweepLayers(c *model.Config, stages int64) []int64 {
	layer := float64(4*c.Hidden*c.Hidden + 3*c.Hidden*c.MLP)
	whole := layer*float64(c.Layers) + float64(c.Vocab*c.Hidden)
	list := make([]int64, stages)
	at := int64(0)
	for i := range c.Layers {
		if layer*float64(i+1) > whole*float64(at+1)/float64(stages)*(1+1e-12) {
			at = min(at+1, stages-1)
		}
		list[at]++
	}
	return list
}

// A sweepStack is nanotron on that cluster, as numbers.
type sweepStack struct {
	product, thin, attention, stream     float64
	link, network, crowd, spread, half   float64
	floor, pipe, power, floor16, floor32 float64
	turn                                 float64
	gradients, zero, late, far, inside   float64
	bucket, adds, hosted                 float64
}

func (k *sweepStack) effects() []price.Effect {
	list := []price.Effect{
		{Name: "product", Value: &k.product, Prior: 1.05, Sigma: 0.15, Why: "as in Profile"},
		{Name: "thin", Value: &k.thin, Prior: 200, Sigma: 0.5, Why: "GEMMs that tp makes thin"},
		{Name: "attention", Value: &k.attention, Prior: 1, Sigma: 0.3, Why: "as in Profile"},
		{Name: "stream", Value: &k.stream, Prior: 1.5, Sigma: 0.4, Why: "as in Profile"},
		{Name: "link", Value: &k.link, Prior: 1.2, Sigma: 0.3, Why: "as in Profile"},
		{Name: "network", Value: &k.network, Prior: 1.2, Sigma: 0.4, Why: "tp over hosts"},
		{Name: "crowd", Value: &k.crowd, Prior: 0.1, Sigma: 0.7, Why: "more such groups, slower each"},
		{Name: "spread", Value: &k.spread, Prior: 3e-4, Sigma: 0.5, Why: "s for each host of tp"},
		{Name: "half", Value: &k.half, Prior: 0.8, Sigma: 0.3, Why: "the same at tp 32"},
		{Name: "floor", Value: &k.floor, Prior: 4e-3, Sigma: 0.3, Why: "s of the host for a layer"},
		{Name: "pipe", Value: &k.pipe, Prior: 1.1, Sigma: 0.3, Why: "the same with pp over hosts"},
		{Name: "power", Value: &k.power, Prior: 0.8, Sigma: 0.2, Why: "of tp up to 8 in it"},
		{Name: "floor16", Value: &k.floor16, Prior: 2.2, Sigma: 0.4, Why: "times that at tp 16"},
		{Name: "floor32", Value: &k.floor32, Prior: 4.5, Sigma: 0.4, Why: "at tp 32"},
		{Name: "turn", Value: &k.turn, Prior: 0.24, Sigma: 0.4, Why: "s a stage and microbatch, tp 32"},
		{Name: "gradients", Value: &k.gradients, Prior: 1, Sigma: 0.5, Why: "as in Profile"},
		{Name: "zero", Value: &k.zero, Prior: 1.5, Sigma: 0.4, Why: "ZeRO overlaps less"},
		{Name: "late", Value: &k.late, Prior: 3, Sigma: 0.7, Why: "nothing overlaps with pp"},
		{Name: "far", Value: &k.far, Prior: 0.1, Sigma: 0.7, Why: "for each doubling of hosts"},
		{Name: "inside", Value: &k.inside, Prior: 1.5, Sigma: 0.5, Why: "NVLink against network"},
		{Name: "bucket", Value: &k.bucket, Prior: 5e-4, Sigma: 0.7, Why: "s for a layer's gradients"},
		{Name: "adds", Value: &k.adds, Prior: 0.7, Sigma: 0.3, Why: "gradients added up in f32"},
		{Name: "hosted", Value: &k.hosted, Prior: 6, Sigma: 0.4, Why: "power of host and device"},
	}
	for i := range list {
		list[i].Sigma *= list[i].Prior
	}
	return list
}

// profile gives the constants of one run.
func (k *sweepStack) profile(base *price.Profile, s *sweepRow) *price.Profile {
	p := base.Clone()
	tp := float64(s.tp)
	p.GEMM = k.product * (1 + k.thin*tp/float64(8*s.config.Hidden))
	p.Attention, p.Stream, p.Link, p.Network = k.attention, k.stream, k.link, 1.2
	p.Latency, p.Optimizer, p.Hosted, p.Regather = 1, 1, 1+k.hosted, false
	if s.tp > 8 {
		p.Network = k.network * math.Pow(max(1, float64(s.hosts)*8/tp), k.crowd)
	}
	if s.tp > 8 && !s.crosses() {
		p.Spread = k.spread
		if s.tp > 16 {
			p.Spread *= k.half
		}
	}
	p.Operation = k.layer(s) / sweepOperations
	p.Gradients, p.HideData = k.reduce(s)*1.2/p.Network, 0
	// Of one step: buckets of gradients, and what adds them up in every microbatch, which reads and
	// writes f32 and reads bf16.
	c := s.config
	weights := float64(s.longest)*float64(4*c.Hidden*c.Hidden+3*c.Hidden*c.MLP) +
		float64(c.Hidden*c.Vocab)*min(1, 1.5/float64(s.pp))
	p.Step = 0.01 + k.adds*float64(s.acc)*weights/tp*10/float64(s.cluster.GPU.MemoryBandwidth)
	if s.dp > 1 {
		p.Step += k.bucket * math.Log2(float64(s.dp)) * float64(s.longest)
	}
	return p
}

// sweepOperations is the number of operations that the estimator counts for a dense layer sharded
// by tp.
const sweepOperations = 48

// layer is the least time of a layer in a microbatch.
func (k *sweepStack) layer(s *sweepRow) float64 {
	if !s.crosses() {
		return k.floor
	}
	t := k.floor * k.pipe * math.Pow(float64(min(s.tp, 8)), k.power)
	switch s.tp {
	case 16:
		t *= k.floor16
	case 32:
		t = t*k.floor32 + k.turn*float64(s.pp)/float64(s.longest)
	}
	return t
}

// reduce is a factor of data parallelism's collectives. Those inside a host and between hosts
// follow each other here, where the price of a collective is the longer one.
func (k *sweepStack) reduce(s *sweepRow) float64 {
	if s.dp == 1 {
		return 1
	}
	own := max(1, min(float64(s.dp), float64(8/min(s.tp, 8)))) // ranks of a host
	hosts := float64(s.dp) / own
	near, far := (own-1)/own/450, (hosts-1)/hosts/own/50 // GB/s of NVLink and of the network
	g := k.gradients * (1 + k.far*math.Log2(hosts)) * (k.inside*near + far) / max(near, far)
	switch {
	case s.zero > 0:
		return g * k.zero
	case s.pp > 1:
		return g * k.late
	}
	return g
}

// A sweep is rows and what is fitted on them.
type sweep struct {
	rows  []sweepRow
	stack sweepStack
	base  *price.Profile
	regression
}

func newSweep() (*sweep, error) {
	rows, err := nanotron()
	if err != nil {
		return nil, err
	}
	base, err := price.Find("megatron")
	if err != nil {
		return nil, err
	}
	w := &sweep{rows: rows, base: base}
	w.regression = regression{constants: w.stack.effects(), noise: 0.1, rounds: 10, predict: w.times}
	for i := range rows {
		w.measured = append(w.measured, rows[i].seconds)
	}
	return w, nil
}

func (w *sweep) times(values []float64, rows []int) ([]float64, error) {
	for j, c := range w.constants {
		*c.Value = values[j]
	}
	out := make([]float64, len(rows))
	for i, k := range rows {
		s := &w.rows[k]
		est, err := s.pricer.Under(w.stack.profile(w.base, s)).Price(s.plan)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.id, err)
		}
		out[i] = est.Step
	}
	return out, nil
}
