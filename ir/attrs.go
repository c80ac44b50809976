package ir

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// attributes are the constants that each operation of this package may have: words of the form
// key:type, where a type is b (bool), i (int64), f (float64), s (string) or l (list of strings),
// and ! marks one that must be there. An operation that is not listed has none. Rows of other
// tables check their own.
var attributes = func() map[string]map[string]string {
	const (
		gemm = "over:l in:s to:s fprop:s dgrad:s wgrad:s slot:i layer:i swap:b"
		move = "axis:s dim:s sum:s prefetch:b"
		attn = "scale:f causal:b window:i softcap:f in:s lengths:b placed:b ring:s balanced:b plain:b " +
			"documents:i sinks:b"
		loss = "dim:s axis:s valid:i"
		bits = "along:l format:s hadamard:b tile:b stochastic:b tensor:i"
	)
	all := map[string]map[string]string{}
	for kind, words := range map[string]string{
		"scale": "by:f!", "shift": "by:f!", "convert": "to:s", "compare": "how:s",
		"fill": "type:s value:f", "iota": "type:s dim:s", "embedding_dw": "type:s",
		"dot": gemm, "linear": gemm, "linear_dx": gemm, "linear_dw": gemm,
		"block_dot": gemm + " format:s", "block_dw": gemm,
		"transpose": "order:l", "rename": "from:s to:s", "broadcast": "at:i dim:s size:i sharded:l",
		"split": "dim:s major:s minor:s size:i", "merge": "dim:s major:s minor:s",
		"slice": "dim:s from:i to:i local:b", "pad": "dim:s low:i high:i local:b",
		"concat": "dim:s local:b", "sum": "over:l", "max": "over:l", "softmax": "dim:s",
		"rms_norm": "dim:s eps:f shift:f", "layer_norm": "dim:s eps:f",
		"rope": "theta:f factor:f low:f high:f original:f fast:f slow:f exact:b magnitude:f " +
			"back:b",
		"attention": attn, "attention_grad": attn,
		"cross_entropy": loss, "cross_entropy_grad": loss,
		"expert_positions": "experts:i over:l local:b", "expert_counts": "experts:i over:l",
		"expert_overflow": "capacity:i blocks:b",
		"dispatch":        "experts:i capacity:i blocks:b axis:s payload:s",
		"combine":         "apart:b axis:s payload:s",
		"gather":          "dim:s", "scatter": "dim:s size:i", "top_k": "dim:s k:i",
		"all_gather": move + " apart:b", "reduce_scatter": move, "shard_slice": move,
		"all_reduce": "axis:s axes:l", "all_to_all": "axis:s from:s to:s",
		"repeat":   "n:i carries:i stacked:i first:i reverse:b",
		"quantize": bits, "quantize_stats": bits, "amax": bits + " axes:l",
		"dequantize": "format:s to:s", "join_stats": "axes:l sum:b",
	} {
		all[kind] = map[string]string{}
		for word := range strings.FieldsSeq(words) {
			key, typ, _ := strings.Cut(word, ":")
			all[kind][key] = typ
		}
	}
	return all
}()

// letter is the type of a constant as attributes writes it, "" for a type that it cannot have.
func letter(v any) string {
	switch v.(type) {
	case bool:
		return "b"
	case int64:
		return "i"
	case float64:
		return "f"
	case string:
		return "s"
	case []string:
		return "l"
	}
	return ""
}

// checkAttrs reports a constant that an operation of this package does not have, one of another
// type, which its reader would take for zero, and one that is missing.
func (op *Op) checkAttrs() error {
	if op.spec() != builtin()[op.Kind] {
		return nil
	}
	known := attributes[op.Kind]
	for _, x := range op.Attrs {
		typ, ok := known[x.Key]
		switch {
		case !ok:
			keys := slices.Sorted(maps.Keys(known))
			hint := ""
			if near := diag.Nearest(x.Key, keys); near != "" {
				hint = "; did you mean " + near + "?"
			}
			return fmt.Errorf("has no attribute %s, only [%s]%s", x.Key, joined(keys), hint)
		case typ[:1] != letter(x.Value):
			want := map[string]string{"b": "bool", "i": "int", "f": "float64", "s": "string",
				"l": "[]string"}[typ[:1]]
			return fmt.Errorf("attribute %s is %v, a %T; it must be a %s", x.Key, x.Value, x.Value, want)
		}
	}
	for key, typ := range known {
		if typ[1:] == "!" && op.Attrs.get(key) == nil {
			return fmt.Errorf("lacks the attribute %s", key)
		}
	}
	return nil
}
