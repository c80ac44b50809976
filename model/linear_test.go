package model

import "testing"

func TestLinearName(t *testing.T) {
	for weight, want := range map[string]string{
		"q": "q", "block.q": "q", "block3.expert_gate.7": "expert_gate", "head": "head",
		"model.layers.self_attn.o_proj": "o", "h.mlp.0": "up", "h.mlp.0.5": "up", "h.mlp.2": "down",
		"transformer.h.attn.c_proj": "o", "transformer.h.mlp.c_proj.11": "down",
		"model.layers.mlp.experts.down_proj": "expert_down", "layers.from1.attn.qkv": "q",
		"layers.odd": "odd", "layers.odd.3": "odd",
	} {
		if got := LinearName(weight); got != want {
			t.Errorf("%s is %s, want %s", weight, got, want)
		}
	}
}
