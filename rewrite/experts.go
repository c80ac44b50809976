package rewrite

import "github.com/deepwell/deepwell/ir"

// partShared puts a barrier behind the shared experts where they are added to what the routed
// experts give: cuBLASLt would take the sum as its C operand, and the shared experts' last GEMM
// would wait for the all-to-all that it should hide (reference/moe_lowering.md, section 4).
func partShared(g *ir.Graph) error {
	return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
		if op.Kind != "add" {
			return nil
		}
		for i, v := range op.In {
			other := op.In[1-i]
			if combines(v) && other.Def() != nil && !combines(other) && gemm(other.Def().Kind) {
				in := []*ir.Value{v, r.ReplaceWith(op, Barrier, nil, other)[0]}
				return r.ReplaceWith(op, "add", op.Attrs, in...)
			}
		}
		return nil
	})
}

// combines tells what experts give, maybe reduced over tensor-parallel devices.
func combines(v *ir.Value) bool {
	for v.Def() != nil {
		switch v.Def().Kind {
		case "combine":
			return true
		case "all_reduce", "reduce_scatter", "convert":
			v = v.Def().In[0]
		default:
			return false
		}
	}
	return false
}

// gemm tells a matrix product.
func gemm(kind string) bool {
	return kind == "linear" || kind == "dot" || kind == "block_dot"
}
