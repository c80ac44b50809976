// Command balance trains small models with experts on text and prints how the load of the experts
// develops: with the correction bias that balances routers without a loss (DeepSeek-V3), and with
// nothing that balances them.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/event"
)

var (
	deepwell = flag.String("deepwell", "deepwell", "the deepwell binary")
	text     = flag.String("text", "", "pattern of the text to train on, such as 'src/**/*.go'")
	steps    = flag.Int("steps", 1000, "steps of each run")
	work     = flag.String("work", "", "folder for runs; empty makes a temporary one")
)

// settled is the step after which loads are judged.
const settled = 200

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "balance:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	dir := *work
	if dir == "" {
		if dir, err = os.MkdirTemp("", "balance"); err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
	}
	tokens := filepath.Join(dir, "tokenizer.json")
	if err := command("data", "tokenizer", *text, "--vocab", "2048", "-o", tokens); err != nil {
		return err
	}
	fmt.Printf("of the mean load behind step %d: of all steps, in the worst layer, and of one step, "+
		"mean over steps and layers\n\n", settled)
	fmt.Printf("%-8s %-8s %7s %8s %7s %9s %8s %10s\n", "experts", "balance", "loss", "busiest",
		"idlest", "one step", "dropped", "collapsed")
	for _, experts := range []int{8, 64} {
		for _, rate := range []string{"0.005", "0"} {
			out := filepath.Join(dir, fmt.Sprintf("%d-%s", experts, rate))
			if err := train(out, tokens, experts, rate); err != nil {
				return err
			}
			if err := summary(filepath.Join(out, "events.jsonl"), experts, rate); err != nil {
				return err
			}
		}
	}
	return nil
}

// command runs deepwell.
func command(args ...string) error {
	var said bytes.Buffer
	c := exec.Command(*deepwell, args...)
	c.Stdout, c.Stderr = &said, &said
	if err := c.Run(); err != nil {
		return fmt.Errorf("deepwell %v: %w\n%s", args, err, said.Bytes())
	}
	return nil
}

// config is DeepSeek-V3's family with about a million active parameters.
func config(experts int) map[string]any {
	return map[string]any{"architectures": []string{"DeepseekV3ForCausalLM"},
		"model_type": "deepseek_v3", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
		"moe_intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
		"num_key_value_heads": 4, "n_routed_experts": experts, "num_experts_per_tok": 2,
		"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
		"norm_topk_prob": true, "routed_scaling_factor": 1.0, "kv_lora_rank": 32, "q_lora_rank": 64,
		"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "rope_theta": 10000.0,
		"max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6}
}

// rates are learning rates by the number of experts: at 2e-3 a run with 64, of which each has 16
// tokens a step, was ended by the guard at step 45.
var rates = map[int]float64{8: 2e-3, 64: 5e-4}

// train makes one run, unless it is there.
func train(out, tokens string, experts int, rate string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	model, err := json.Marshal(config(experts))
	if err != nil {
		return err
	}
	path := filepath.Join(out, "config.json")
	if err := os.WriteFile(path, model, 0o644); err != nil {
		return err
	}
	recipe := fmt.Sprintf(`model = %q
init = "random"
out = %q
steps = %d
batch = 4
seq = 128
precision = "f32"
[optimizer]
lr = %g
warmup = 100
[experts]
aux_loss = 0.0
bias_rate = %s
[data]
sources = [%q]
tokenizer = %q
[save]
every = 0
`, path, out, *steps, rates[experts], rate, *text, tokens)
	file := filepath.Join(out, "run.toml")
	if err := os.WriteFile(file, []byte(recipe), 0o644); err != nil {
		return err
	}
	return command("train", file, "--device", "cpu")
}

// summary prints the loads of a run behind its first steps.
func summary(path string, experts int, rate string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	var each []float64
	total, dropped := map[int][]float64{}, 0.0
	loss, collapsed := 0.0, map[int]bool{}
	for rec, err := range event.Read(f) {
		if err != nil {
			return err
		}
		switch e := rec.Event.(type) {
		case event.Step:
			loss += (float64(e.Loss) - loss) / 50
			if e.Step == 1 {
				loss = float64(e.Loss)
			}
		case event.RouterCollapsed:
			collapsed[e.Layer] = true
		case event.Experts:
			for _, l := range e.Layers {
				if e.Step <= settled {
					continue
				}
				each, dropped = append(each, l.Busiest), dropped+l.Dropped
				if total[l.Layer] == nil {
					total[l.Layer] = make([]float64, len(l.Tokens))
				}
				for i, n := range l.Tokens {
					total[l.Layer][i] += float64(n)
				}
			}
		}
	}
	if len(each) == 0 {
		return fmt.Errorf("%s has no loads behind step %d", path, settled)
	}
	busiest, idlest := 0.0, math.Inf(1)
	for _, list := range total {
		mean := sum(list) / float64(len(list))
		busiest, idlest = max(busiest, slices.Max(list)/mean), min(idlest, slices.Min(list)/mean)
	}
	fmt.Printf("%-8d %-8s %7.3f %8.2f %7.2f %9.2f %8.0f %4d layers\n", experts,
		map[string]string{"0": "none", "0.005": "bias"}[rate], loss, busiest, idlest,
		sum(each)/float64(len(each)), dropped, len(collapsed))
	return nil
}

func sum(list []float64) (n float64) {
	for _, x := range list {
		n += x
	}
	return n
}
