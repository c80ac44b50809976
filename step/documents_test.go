package step_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// Offsets of documents are 32 bits. A device's own tokens fit where gathered keys do not: 2¹⁹
// tokens of 32 heads of 128 elements.
func TestOffsetsOfGatheredKeys(t *testing.T) {
	c, err := model.Parse([]byte(`{"model_type": "llama", "vocab_size": 128, "hidden_size": 128,
"intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 32,
"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 524288,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`))
	if err != nil {
		t.Fatal(err)
	}
	for kind, fits := range map[string]bool{"gather": false, "ring": true} {
		p := plan.Default()
		p.CP = plan.CP{Size: 4, Kind: kind}
		p.Seq, p.Batch, p.Microbatches, p.Types.Params = 1<<19, 1, 1, dtype.BF16
		p.Cluster = "4xb200"
		_, err := step.Build(step.Spec{Model: c, Recipe: step.RecipeOf(p), Arch: "sm_100", Plan: p})
		if fits != (err == nil) || !fits && !strings.Contains(err.Error(), "offsets of 32 bits") {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
