package cost_test

import (
	"fmt"
	"github.com/deepwell/deepwell/kernels"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/spmd"
)

// shapes are models whose sizes are all different, one with fewer key heads than tp may have.
func shapes() map[string]*model.Config {
	llama := model.Config{Arch: "llama", Vocab: 1008, Hidden: 64, Layers: 6, Heads: 8, KVHeads: 4,
		HeadDim: 16, MLP: 128, Context: 512, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 100}, Rotary: 16, AttnScale: 0.2, BOS: -1}
	qwen := llama
	qwen.Arch, qwen.QKNorm, qwen.Tied, qwen.KVHeads, qwen.Vocab = "qwen3", true, true, 2, 1000
	gpt := llama
	gpt.Arch, gpt.Learned, gpt.Gated, gpt.Tied, gpt.Activation = "gpt2", true, false, true, model.GELU
	gpt.QKVBias, gpt.OutBias, gpt.MLPBias, gpt.KVHeads, gpt.Vocab = true, true, true, 8, 1001
	gpt.Norm.Layer = true
	mixtral := llama
	mixtral.Arch = "mixtral"
	mixtral.MoE = &model.MoE{Experts: 16, TopK: 4, MLP: 128, Score: "softmax", Normalize: true,
		Scale: 1}
	deepseek := llama // latent attention, two dense layers, groups and a shared expert
	deepseek.Arch, deepseek.KVHeads, deepseek.HeadDim, deepseek.Rotary = "deepseek_v3", 8, 48, 32
	deepseek.MLA = &model.MLA{QRank: 64, KVRank: 32, NoPE: 16, Rope: 32, Value: 16}
	deepseek.MoE = &model.MoE{Experts: 16, TopK: 4, MLP: 64, Shared: 64, Dense: 2, Groups: 4,
		TopGroups: 2, Score: "sigmoid", Normalize: true, Scale: 2.5, Correction: true}
	return map[string]*model.Config{"llama": &llama, "qwen3": &qwen, "gpt2": &gpt,
		"mixtral": &mixtral, "deepseek": &deepseek}
}

var types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}

// graph returns the loss graph of a microbatch.
func graph(t *testing.T, c *model.Config, p *plan.Plan) *ir.Graph {
	t.Helper()
	documents, _ := kernels.For("sm_100").Documents(0, kernels.Planned(c.Facts(), c.Window > 0,
		p.Types.Params, p.CP, p.Seq, p.PlainAttention()))
	g, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: p.Types.Params,
		Documents: documents})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// The collectives of a bill equal the census, which compiled programs are compared with: for every
// axis alone and every pair.
func TestCollectivesAreTheCensus(t *testing.T) {
	for name, c := range shapes() {
		for _, row := range plantest.Combine(2, plantest.Meshes()...) {
			p := row.Plan(plantest.Size{Batch: 16, Micros: 1, Seq: 64})
			if p.Types = types; p.Check(c) != nil {
				continue
			}
			sh, err := spmd.Shard(graph(t, c, p), p)
			if err != nil {
				t.Fatal(err)
			}
			gr, err := ir.Grad(sh.Graph, ir.GradPlan{Terms: true, Recompute: []ir.Tag{ir.Gather, ir.Attn}})
			if err != nil {
				t.Fatal(err)
			}
			for _, g := range []*ir.Graph{gr.Forward, gr.Backward} {
				got, want := map[string][2]int64{}, map[string][2]int64{}
				cost.Of(g, 1, func(item cost.Item, times int64) {
					for _, s := range item.Sends {
						key := s.Kind + " " + strings.Join(s.Axes, " ")
						n := got[key]
						got[key] = [2]int64{n[0] + times*s.Count, n[1] + times*s.Count*s.Bytes}
					}
				})
				for _, row := range spmd.CensusOf(g) {
					kind := strings.ReplaceAll(strings.TrimPrefix(string(row.Kind), "collective-"), "-", "_")
					want[kind+" "+strings.Join(row.Axes, " ")] = [2]int64{row.Count, row.Bytes}
				}
				if !maps.Equal(got, want) {
					t.Errorf("%s %s, %s: the bill sends\n%v, the graph\n%v", name, row.Name, g.Name, got, want)
				}
			}
		}
	}
}

// shardings lists ways to shard a microbatch.
func shardings() (list []cost.Sharding) {
	for _, again := range [][]ir.Tag{nil, {ir.Norm, ir.Attn}, {ir.Norm, ir.Attn, ir.MLP}} {
		for _, tp := range []int64{1, 2, 4, 8} {
			for _, cp := range []int64{1, 4} {
				for _, sequence := range []bool{false, true} {
					c := cost.Sharding{Rows: 4, Seq: 128, TP: tp, CP: cp, Params: dtype.BF16, Again: cost.TagsOf(again)}
					if cp > 1 {
						c.Kind = map[bool]string{false: "gather", true: "ring"}[sequence]
					}
					if sequence {
						c.Sequence, c.Overlap = true, tp == 4
					}
					if !sequence || tp > 1 {
						list = append(list, c)
					}
					if heads := int64(8); cp > 1 && heads/tp%cp == 0 { // copies of KV heads, or none
						c.Kind = "a2a"
						list = append(list, c)
						c.Kind, c.Inner = "a2a+ring", 2
						list = append(list, c)
					}
				}
			}
		}
	}
	return list
}

// shardingsOf lists ways to shard a microbatch of a model, with and without expert parallelism, and
// with slots that are no whole number for a sequence.
func shardingsOf(c *model.Config) (list []cost.Sharding) {
	if c.MoE == nil {
		return shardings()
	}
	for _, cut := range shardings() {
		if cut.Overlap || cut.TP > 2 || cut.Again == 0 { // a layer with experts has no half batches
			continue
		}
		cut.Again |= cost.TagsOf([]ir.Tag{ir.Experts})
		cut.EP, cut.Slots = 8, 1.5
		list = append(list, cut)
		if cut.TP == 1 {
			cut.EP = 1
			list = append(list, cut)
			cut.EP, cut.Slots = 2, 1.3
			list = append(list, cut)
		}
	}
	return list
}

// A bill scaled from another graph equals the bill of its own graph.
func TestBillsScale(t *testing.T) {
	for name, c := range shapes() {
		book := cost.New(c, "sm_100", nil)
		for _, cut := range shardingsOf(c) {
			got, err := book.Bill(cut)
			if err != nil {
				t.Fatal(err)
			}
			want, err := cost.Built(c, cut)
			if err != nil {
				t.Fatal(err)
			}
			if a, b := text(got), text(want); a != b {
				t.Fatalf("%s, %+v: scaled\n%s\nbuilt\n%s", name, cut, a, b)
			}
		}
	}
}

// text writes all of a bill but for its operations.
func text(b *cost.Bill) string {
	var s strings.Builder
	for _, p := range append([]cost.Part{b.Embed, b.Head}, b.Layers...) {
		fmt.Fprintln(&s, p.From, p.Rounds, p.Residuals, p.Cheap, p.Late, p.Made, p.Data, p.Flow, p.Whole,
			p.MLP, p.Logits)
		for _, list := range p.Items() {
			for _, item := range list {
				fmt.Fprint(&s, item.Kind, item.Tag, item.Batch, item.M, item.K, item.N, item.Bytes, " ")
				for _, send := range item.Sends {
					fmt.Fprint(&s, send.Kind, send.Axes, send.Count, send.Bytes, " ")
				}
			}
		}
		fmt.Fprintln(&s)
	}
	return s.String()
}

// What pipeline stages save of a microbatch, and pass from dgrad to wgrad, equals the inputs of
// the stages' programs.
func TestStagesKeepWhatTheBillSays(t *testing.T) {
	for name, c := range shapes() {
		for _, format := range []string{"", "mxfp8"} {
			var policy *precision.Policy
			if format != "" {
				var err error
				if policy, err = precision.Default(c, format); err != nil {
					t.Fatal(err)
				}
			}
			book := cost.New(c, "sm_100", policy)
			for _, cut := range shardings() {
				if cut.CP > 1 || cut.TP > 2 || cut.Overlap {
					continue
				}
				bill, err := book.Bill(cut)
				if err != nil {
					t.Fatal(err)
				}
				for k, want := range staged(t, c, cut, policy) {
					var kept, handed int64
					for i := range bill.Layers {
						l := &bill.Layers[i]
						n := max(0, min(l.From+l.Rounds, 2*int64(k)+2)-max(l.From, 2*int64(k)))
						kept += n * sum(l.Residuals)
						handed += n * (sum(l.Late) + sum(l.Made))
					}
					if k == 2 {
						kept += sum(bill.Head.Residuals)
						handed += sum(bill.Head.Late) + sum(bill.Head.Made)
					}
					if kept != want[0] || k > 0 && max(handed-want[1], want[1]-handed) > scalars {
						t.Errorf("%s %s, %+v, stage %d keeps %d and hands on %d, by the bill %d and %d", name,
							format, cut, k, want[0], want[1], kept, handed)
					}
				}
			}
		}
	}
}

// scalars is what a program may take besides: the gradient of the loss by itself.
const scalars = 4

func sum(list []int64) (n int64) {
	for _, x := range list {
		n += x
	}
	return n
}

// staged builds three stages of two layers as train does, and adds up what their gradients take of
// a microbatch beside data: all together, and the gradient of the weights.
func staged(t *testing.T, c *model.Config, cut cost.Sharding, policy *precision.Policy) (list [][2]int64) {
	t.Helper()
	p := plan.Default()
	p.Seq, p.Batch, p.Types = cut.Seq, cut.Rows, types
	p.TP = plan.TP{Size: cut.TP, Sequence: cut.Sequence}
	g := graph(t, c, p)
	if policy != nil {
		var err error
		if g, _, err = policy.Apply(g, c.Params()); err != nil {
			t.Fatal(err)
		}
	}
	stages, err := spmd.Stages(g, []int64{2, 2, 2})
	if err != nil {
		t.Fatal(err)
	}
	for k, st := range stages {
		sh, err := spmd.Shard(st.Graph, p)
		if err != nil {
			t.Fatal(err)
		}
		b := pipeline.Boundary{Recompute: append(cut.Again.List(), ir.Gather), Terms: true,
			ReduceGrad: sh.Scatter}
		if k > 0 {
			b.Inputs = []string{spmd.Hidden}
		}
		if k < 2 {
			b.Outputs = []string{sh.Graph.Results[0].Name}
		}
		gs, err := pipeline.Differentiate(sh.Graph, b)
		if err != nil {
			t.Fatal(err)
		}
		var blocks spmd.QuantizedCopies
		var taken [2]int64
		for i, one := range []*ir.Graph{gs.Backward, gs.Wgrad} {
			if _, err := blocks.Expand(one, ir.ReportNothing); err != nil {
				t.Fatal(err)
			}
			for _, v := range one.Inputs {
				other := slices.Concat(gs.OutputGrads, gs.Ones, gs.Accumulators)
				if v.Role == ir.Residual && !slices.Contains(other, v.Name) || v.Name == spmd.Hidden {
					taken[i] += v.Type.Shape().Bytes()
				}
			}
		}
		list = append(list, taken)
	}
	return list
}
