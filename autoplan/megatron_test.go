package autoplan

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/price"
)

// obeys checks arguments against what Megatron-LM asserts at startup on that many devices:
// NVIDIA/Megatron-LM at 00caa53a (pipeline_parallel_layer_layout.py, "layout"), and
// transformer_block.py at d98e8a64 ("block").
func obeys(text string, c *model.Config, devices int64) error {
	args := map[string]string{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if args[name] = strings.Trim(value, `"`); !strings.HasPrefix(name, "--") {
			return fmt.Errorf("%q is no argument", line)
		}
	}
	number := func(name string, otherwise int64) int64 {
		if n, err := strconv.ParseInt(args[name], 10, 64); err == nil {
			return n
		}
		return otherwise
	}
	tp, pp := number("--tensor-model-parallel-size", 1), number("--pipeline-model-parallel-size", 1)
	cp, ep := number("--context-parallel-size", 1), number("--expert-model-parallel-size", 1)
	vpp := number("--num-virtual-stages-per-pipeline-rank", 1)
	layout, laid := args["--pipeline-model-parallel-layout"]
	if devices%(tp*pp*cp) != 0 { // arguments.py: world size is a multiple of the model's size
		return fmt.Errorf("%d devices for tp %d, pp %d, cp %d", devices, tp, pp, cp)
	}
	dp := devices / (tp * pp * cp)
	microbatch, batch := number("--micro-batch-size", 0), number("--global-batch-size", 0)
	if microbatch < 1 || batch%(microbatch*dp) != 0 { // num_microbatches_calculator.py
		return fmt.Errorf("%d rows by %d over %d ranks", batch, microbatch, dp)
	}
	if laid {
		if vpp > 1 { // the layout says how many virtual stages there are
			return errors.New("a layout and virtual stages beside it")
		}
		stages := unrolled(layout)
		if int64(len(stages))%pp != 0 { // layout, 38
			return fmt.Errorf("%d stages over pp %d", len(stages), pp)
		}
		vpp = int64(len(stages)) / pp
		flat := strings.Join(stages, "")
		switch { // layout, 92 to 108
		case strings.Trim(flat, "EtLm") != "":
			return fmt.Errorf("%q has other letters than E, t, m and L", flat)
		case !strings.HasPrefix(flat, "E") || !strings.HasSuffix(flat, "L") ||
			strings.Count(flat, "E") != 1 || strings.Count(flat, "L") != 1:
			return fmt.Errorf("%q does not begin with its embedding and end with its loss", flat)
		case int64(strings.Count(flat, "t")) != c.Layers:
			return fmt.Errorf("%q has not %d layers", flat, c.Layers)
		}
	} else if c.Layers%pp != 0 || c.Layers/pp%vpp != 0 { // block, 158 and 178
		return fmt.Errorf("%d layers over pp %d, vpp %d", c.Layers, pp, vpp)
	}
	if vpp > 1 && batch/(microbatch*dp)%pp != 0 { // schedules.py: interleaved wants whole rounds
		return fmt.Errorf("%d microbatches over pp %d", batch/(microbatch*dp), pp)
	}
	if c.MoE != nil && (c.MoE.Experts%ep != 0 || dp*cp*tp%ep != 0) {
		return fmt.Errorf("%d experts over ep %d of %d ranks", c.MoE.Experts, ep, dp*cp*tp)
	}
	_, sequence := args["--sequence-parallel"]
	if sequence && tp == 1 || c.MoE != nil && tp > 1 && !sequence {
		return fmt.Errorf("sequence parallel %v with tp %d", sequence, tp)
	}
	if n := number("--num-distributed-optimizer-instances", 1); dp*cp%n != 0 {
		return fmt.Errorf("%d instances of the optimizer over %d ranks", n, dp*cp)
	}
	return nil
}

// unrolled gives the stages of a layout: groups in parentheses first, then letters.
func unrolled(layout string) []string {
	layout = strings.ReplaceAll(layout, ",", "")
	for _, pattern := range []string{`\(([^)]+)\)\*(\d+)`, `(.)\*(\d+)`} {
		re := regexp.MustCompile(pattern)
		layout = re.ReplaceAllStringFunc(layout, func(s string) string {
			m := re.FindStringSubmatch(s)
			n, _ := strconv.Atoi(m[2])
			return strings.Repeat(m[1], n)
		})
	}
	return strings.Split(layout, "|")
}

// emitted searches for Megatron and holds what is emitted to its asserts.
func emitted(t testing.TB, j Job, stack string) (texts []string) {
	var err error
	if j.Profile, err = price.Find(stack); err != nil {
		t.Fatal(err)
	}
	r, err := Search(t.Context(), j)
	if err != nil {
		return nil // nothing fits: nothing is emitted
	}
	for _, c := range r.Choices {
		if c.Plan.FSDP.Zero > 1 && c.Plan.FSDP.Size > 1 {
			continue // Megatron-FSDP, which has arguments of its own and is refused by name
		}
		text, err := Emit("megatron", j, &c)
		if err != nil {
			t.Fatal(err)
		}
		if err := obeys(text, j.Config, int64(c.Devices)); err != nil {
			t.Errorf("%s on %s: Megatron would refuse %v\n%s", j.Model, j.Cluster, err, text)
		}
		var layers []int64
		if _, layout, ok := strings.Cut(text, "-layout \""); ok {
			layout, _, _ = strings.Cut(layout, "\"")
			for _, s := range unrolled(layout) {
				layers = append(layers, int64(strings.Count(s, "t")))
			}
			for i, s := range c.Estimate.Stages {
				if i >= len(layers) || layers[i] != s.Layers {
					t.Fatalf("priced with %d layers in stage %d, emitted as %v", s.Layers, i, layers)
				}
			}
		}
		shared := c.Plan.FSDP.Size > 1 || c.Plan.EP > 1 || c.Plan.CP.Size > 1
		if shared != strings.Contains(text, "--use-distributed-optimizer") {
			t.Errorf("memory with shared state: %v\n%s", shared, text)
		}
		texts = append(texts, text)
	}
	return texts
}

// Four of four pipeline plans that were emitted once did not start: layers did not divide by pp and
// vpp, though uneven stages are what was priced.
func TestMegatronStartsWhatIsEmitted(t *testing.T) {
	for _, row := range []struct {
		model, cluster string
		fixed          Fixed
		laid           bool
	}{
		{"llama3.1-70b", "64xgb200", Fixed{"pp": "4", "virtual": "8", "schedule": "interleaved"}, true},
		{"llama3.1-405b", "1024xgb200", Fixed{"pp": "16", "virtual": "4", "schedule": "interleaved"}, true},
		{"deepseek-v3", "256xgb200", Fixed{"pp": "8", "schedule": "1f1b", "tp": "1", "recompute": "norm+attn+mlp+experts"}, true},
		{"deepseek-v3", "256xgb200", Fixed{"pp": "2", "virtual": "8", "schedule": "interleaved", "tp": "1", "recompute": "norm+attn+mlp+experts"}, true},
		{"llama3.1-70b", "64xgb200", Fixed{"pp": "4", "virtual": "5", "schedule": "interleaved"}, false},
	} {
		j := jobFor(t, row.model, row.cluster, 4096, 8<<20)
		j.Fixed, j.Top = row.fixed, 2
		texts := emitted(t, j, "megatron")
		if len(texts) == 0 {
			t.Errorf("%s %v: nothing was found", row.model, row.fixed)
		}
		for _, text := range texts {
			if strings.Contains(text, "-layout") != row.laid {
				t.Errorf("%s %v: a layout: %v\n%s", row.model, row.fixed, !row.laid, text)
			}
		}
	}
}

// Whatever a search finds for Megatron, it starts.
func TestMegatronStartsEveryPlan(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		name := rapid.SampledFrom([]string{"llama3.1-8b", "qwen3-30b-a3b", "llama3.2-3b"}).Draw(r, "model")
		cluster := rapid.SampledFrom([]string{"8xb200", "12xb200", "16xgb200", "24xh100"}).Draw(r, "cluster")
		j := jobFor(t, name, cluster, 4096, 0)
		j.Batch = 48 * rapid.Int64Range(1, 4).Draw(r, "rows")
		j.Fixed = Fixed{"cp": "1", "recompute": "norm+attn+mlp"}
		if j.Config.MoE != nil {
			j.Fixed["recompute"] += "+experts"
		}
		if pp := rapid.SampledFrom([]string{"", "2", "3", "4", "6"}).Draw(r, "pp"); pp != "" {
			j.Fixed["pp"] = pp
		}
		j.Top = 2
		emitted(t, j, rapid.SampledFrom([]string{"megatron", "megatron-26.08"}).Draw(r, "stack"))
	})
}

// The flags are what the prediction assumes: overlap only for the profiles that have it, and the
// modules that Megatron can recompute alone. "attn" was once core_attn and priced as all of
// attention, and no flag of overlap was ever written.
func TestMegatronFlagsAreAsPredicted(t *testing.T) {
	for _, c := range []struct {
		model, stack, fixed string
		has, lacks          []string
	}{
		{"llama3.1-70b", "megatron", "zero=1,recompute=attn", []string{"core_attn"},
			[]string{"--overlap"}},
		{"llama3.1-70b", "megatron-26.08", "zero=1,fsdp=16,recompute=norm+mlp",
			[]string{"--overlap-grad-reduce\n", "--overlap-param-gather\n", "layernorm mlp"}, nil},
		{"deepseek-v3", "megatron-26.08", "ep=32,pp=4,recompute=attn+experts",
			[]string{"mla_up_proj moe_act"}, []string{"core_attn"}},
	} {
		j := jobFor(t, c.model, "256xgb300", 4096, 8<<20)
		var err error
		if j.Fixed, err = ParseFixed(c.fixed); err != nil {
			t.Fatal(err)
		}
		texts := emitted(t, j, c.stack)
		if len(texts) == 0 {
			t.Fatalf("%s for %s: nothing emitted", c.model, c.stack)
		}
		for _, part := range c.has {
			if !strings.Contains(texts[0], part) {
				t.Errorf("%s for %s lacks %q:\n%s", c.model, c.stack, part, texts[0])
			}
		}
		for _, part := range c.lacks {
			if strings.Contains(texts[0], part) {
				t.Errorf("%s for %s has %q:\n%s", c.model, c.stack, part, texts[0])
			}
		}
	}
}
