// Command parity runs the table of docs/precision.md: byte models of about 1, 2 and 13 million
// parameters on the source of golang.org/x/tools, from scratch or branching off a trained state, in
// BF16, MXFP8, NVFP4 and NVFP4 in all layers. A fourth model has experts, which -only quantizes
// alone.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/parity"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/tokenizer"
	"github.com/deepwell/deepwell/train"
)

type options struct {
	size, formats, work, corpus, out string
	only                             string
	branch, steps, warmup, pairs     int
	rate                             float64
	batch, seed                      int
	matched, tensors                 bool
}

func main() {
	var o options
	flag.StringVar(&o.size, "size", "2m", "of the model: 1m, 2m or 13m; moe has experts")
	flag.IntVar(&o.branch, "branch", 0, "steps of a branch; 0 starts from scratch")
	flag.IntVar(&o.steps, "steps", 500, "from scratch, or of the trunk")
	flag.IntVar(&o.warmup, "warmup", 50, "steps over which the rate rises")
	flag.IntVar(&o.pairs, "pairs", 3, "of runs")
	flag.IntVar(&o.batch, "batch", 4, "rows of 128 bytes in a step")
	flag.IntVar(&o.seed, "seed", 1, "the first one")
	flag.Float64Var(&o.rate, "rate", 1e-3, "the highest learning rate")
	flag.BoolVar(&o.matched, "matched", false, "BF16 with noise on gradients as well")
	flag.BoolVar(&o.tensors, "tensors", false,
		"round the tensors of the trunk instead, with parts of the recipes switched off")
	flag.StringVar(&o.formats, "formats", "mxfp8,nvfp4", "to compare; all4 is NVFP4 in every layer,"+
		" fprop4, dgrad4 and wgrad4 in one product alone; others are files of policies")
	flag.StringVar(&o.only, "only", "", "of attn, mlp and experts the one that is quantized, "+
		"whatever the formats; \"\" is all")
	flag.StringVar(&o.corpus, "corpus", "", "folder of Go source; \"\" is golang.org/x/tools")
	flag.StringVar(&o.work, "work", "", "folder of trunks and caches")
	flag.StringVar(&o.out, "o", "", "where results go, as JSON and HTML, without the ending")
	rows := flag.Bool("table", false, "print results in named files as rows of a table instead")
	flag.Parse()
	run := run
	if *rows {
		run = func(context.Context, options) error { return table(os.Stdout, flag.Args()) }
	}
	if err := run(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, "parity:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.corpus == "" {
		dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/tools").Output()
		if err != nil {
			return err
		}
		o.corpus = strings.TrimSpace(string(dir))
	}
	job := parity.Job{Pairs: o.pairs, Branch: o.branch, Matched: o.matched, Now: time.Now,
		Events: &watch{}}
	config, err := configOf(o.size)
	if err != nil {
		return err
	}
	job.Model = config
	job.Recipe = recipeOf(o)
	job.Init = func(seed int, p *model.Param, dst []float32) error {
		return config.Init(p, uint64(seed), dst)
	}
	open := newRows(ctx, o)
	defer open.close()
	job.Rows = open.rows
	for name := range strings.SplitSeq(o.formats, ",") {
		if name == "" {
			continue // the null alone
		}
		f := parity.Candidate{Name: name}
		if f.Policy, err = policyOf(config, name); err != nil {
			return err
		}
		if err := keepOthers(f.Policy, o.only); err != nil {
			return err
		}
		f.Bound = parity.Bound(config, f.Policy, o.branch > 0)
		job.Formats = append(job.Formats, f)
	}
	job.Engine, err = engine.Open(ctx, "cpu",
		engine.Options{Cache: filepath.Join(o.work, "cache"), Events: job.Events})
	if err != nil {
		return err
	}
	defer job.Engine.Close()
	return compare(ctx, job, o)
}

// A watch prints how far runs are, now and then.
type watch struct{}

func (watch) Emit(e event.Event) {
	switch e := e.(type) {
	case event.Progress:
		if e.Done%100 == 0 || e.Done == e.Total {
			fmt.Fprintln(os.Stderr, time.Now().Format(time.TimeOnly), e.Task, e.Done, e.Unit)
		}
	case event.Step:
		if e.Step%100 == 0 {
			fmt.Fprintln(os.Stderr, time.Now().Format(time.TimeOnly), e.Line())
		}
	case event.Compiled:
		fmt.Fprintln(os.Stderr, time.Now().Format(time.TimeOnly), e.Line())
	}
}

// compare trains the trunk if there is to be one, makes the runs and writes what came of them.
func compare(ctx context.Context, job parity.Job, o options) error {
	if o.branch > 0 || o.tensors {
		if err := parity.Trunk(ctx, job); err != nil {
			return err
		}
		c, err := ckpt.Latest(ctx, filepath.Join(job.Recipe.Out, "checkpoints"), event.Discard)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		job.From = c
	}
	if o.tensors {
		return ablate(ctx, os.Stdout, job)
	}
	r, err := parity.Run(ctx, job)
	if err != nil {
		return err
	}
	r.Model = job.Recipe.Model
	r.Write(os.Stdout)
	if c, ok := r.Between("all4", "nvfp4"); ok && c.Limits != nil {
		fmt.Printf("%s: %+.4f %% of the loss (sd %.4f, %+.4f … %+.4f)\n", c.Name, c.Mean, c.SD,
			c.Limits.Lower, c.Limits.Upper)
	}
	if o.out == "" {
		return nil
	}
	js, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.out+".json", js, 0o666); err != nil {
		return err
	}
	return os.WriteFile(o.out+".html", r.HTML(), 0o666)
}

// policyOf returns the policy of a format or a file, NVFP4 without the rule that keeps the last
// layers, or NVFP4 in one GEMM alone.
func policyOf(c *model.Config, name string) (*precision.Policy, error) {
	gemmNames := []string{precision.Fprop, precision.Dgrad, precision.Wgrad}
	product, alone := strings.CutSuffix(name, "4")
	alone = alone && slices.Contains(gemmNames, product)
	if name != "all4" && !alone {
		return precision.Load(c, name)
	}
	p, err := precision.Default(c, string(dtype.NVFP4))
	if err != nil {
		return nil, err
	}
	if !alone {
		p.Rules = p.Rules[:len(p.Rules)-1]
		return p, nil
	}
	for i := range p.Rules {
		if p.Rules[i].Format == dtype.NVFP4 {
			p.Rules[i].GEMMs = []string{product}
		}
	}
	return p, nil
}

// keepOthers keeps in BF16 what has another tag than the one given; "" keeps nothing.
func keepOthers(p *precision.Policy, only string) error {
	tags := []string{"attn", "mlp", "experts"}
	at := slices.Index(tags, only)
	if only == "" {
		return nil
	}
	if at < 0 {
		return fmt.Errorf("-only is one of %v, and not %q", tags, only)
	}
	p.Rules = append(p.Rules, precision.Rule{Linears: slices.Delete(tags, at, at+1), To: p.Layers,
		Format: dtype.FormatBF16, Why: "Only " + only + " is compared."})
	return nil
}

// experts is a model like DeepSeek-V3 over bytes, of 4 layers, 3 of which have 8 experts, 2 of them
// and a shared one for each token.
const experts = `{"model_type": "deepseek_v3", "vocab_size": 272, "hidden_size": 192,
"intermediate_size": 576, "moe_intermediate_size": 192, "num_hidden_layers": 4,
"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
"scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 1.0,
"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48,
"max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
"hidden_act": "silu", "tie_word_embeddings": false}`

// configOf gives a model like Llama over bytes, of 4 layers, or the one with experts.
func configOf(size string) (*model.Config, error) {
	if size == "moe" {
		return model.Parse([]byte(experts))
	}
	sizes := map[string][2]int{"1m": {128, 512}, "2m": {192, 576}, "13m": {512, 1408}}
	s, ok := sizes[size]
	if !ok {
		return nil, fmt.Errorf("there is no size %q", size)
	}
	return model.Parse(fmt.Appendf(nil, `{"model_type": "llama", "vocab_size": 272,
"hidden_size": %d, "intermediate_size": %d, "num_hidden_layers": 4, "num_attention_heads": 4,
"num_key_value_heads": 4, "head_dim": %d, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`, s[0], s[1], s[0]/4))
}

func recipeOf(o options) *recipe.Recipe {
	r := recipe.Default()
	r.Model = "llama-" + o.size
	if o.size == "moe" {
		r.Model = "deepseek-" + o.size
	}
	r.Out = filepath.Join(o.work, fmt.Sprintf("state-%s-%g", o.size, o.rate))
	r.Data.Sources = []recipe.Source{{Path: "golang.org/x/tools"}} // a run that goes on compares them
	r.Seed, r.Steps, r.Batch, r.Microbatch, r.Seq = o.seed, o.steps, o.batch, o.batch, 128
	r.Optimizer.LR, r.Optimizer.MinLR, r.Optimizer.Warmup = o.rate, o.rate/10, o.warmup
	return r
}

// rows opens the corpus in the order of a seed, once.
type rows struct {
	ctx    context.Context
	o      options
	opened map[int]*data.Loader
}

func newRows(ctx context.Context, o options) *rows {
	return &rows{ctx: ctx, o: o, opened: map[int]*data.Loader{}}
}

func (r *rows) rows(seed int) (train.Dataset, error) {
	if l := r.opened[seed]; l != nil {
		return l, nil
	}
	// With as many tokens as bytes and an end, nothing is learned from the text.
	text, err := tokenizer.Train(func(func(string) bool) {}, 257, "<|endoftext|>")
	if err != nil {
		return nil, err
	}
	t, err := tokenizer.Parse(text)
	if err != nil {
		return nil, err
	}
	l, err := data.Open(r.ctx, data.Options{Tokenizer: t, Seq: 128, Seed: uint64(seed), Shuffle: true,
		Sources: []data.Source{{Path: filepath.Join(r.o.corpus, "**", "*.go")}},
		Cache:   filepath.Join(r.o.work, "tokens")})
	if err == nil {
		r.opened[seed] = l
	}
	return l, err
}

func (r *rows) close() {
	for _, l := range r.opened {
		_ = l.Close()
	}
}
