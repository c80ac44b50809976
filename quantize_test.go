package deepwell

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/quantize"
)

// The names of a checkpoint are found in a policy, and no layer gets fewer bits than in the policy.
func TestPolicyOfCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.json")
	err := os.WriteFile(path, []byte(`{"version": 1, "layers": 4, "rules": [
		{"linears": ["attn", "mlp", "experts"], "layers": "all", "format": "nvfp4", "why": "all"},
		{"linears": ["down"], "layers": "all", "format": "mxfp8", "why": "outliers"},
		{"linears": ["mlp"], "layers": "3", "products": ["wgrad"], "format": "bf16", "why": "backward"},
		{"linears": ["attn"], "layers": "3", "format": "bf16", "why": "the last"}]}`), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []dtype.Format{dtype.NVFP4, dtype.MXFP8} {
		p, err := policyOf(path, to)
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range []struct {
			module string
			want   dtype.Format
			why    string
		}{
			{"model.layers.0.self_attn.q_proj", to, ""},
			{"model.layers.3.self_attn.q_proj", quantize.None, "the last"},
			{"model.layers.3.self_attn.qkv_proj", quantize.None, "the last"},
			{"model.layers.3.mlp.gate_up_proj", to, ""},
			{"model.layers.3.mlp.down_proj", dtype.MXFP8, ""},
			{"model.layers.1.block_sparse_moe.experts.7.w1", to, ""},
			{"model.layers.1.mlp.shared_expert.down_proj", to, ""},
			{"model.layers.0.mixer.in_proj", quantize.None, "the policy does not name it"},
			{"lm_head", quantize.None, "the policy does not name it"},
		} {
			if got, why := p(row.module, 1, 1); got != row.want || why != row.why {
				t.Errorf("%s to %s: %s %q, want %s %q", row.module, to, got, why, row.want, row.why)
			}
		}
	}
	if _, err := policyOf(filepath.Join(t.TempDir(), "none"), dtype.NVFP4); err == nil {
		t.Error("a policy that is not there was read")
	}
}
