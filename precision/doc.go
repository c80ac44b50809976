// Package precision turns a recipe's precision into the format of every GEMM of a model, and marks
// a graph with these formats.
//
// A linear layer has three GEMMs: fprop (its output), dgrad (the gradient of its input) and wgrad
// (the gradient of its weight). A [Policy] assigns a format to each GEMM of each layer: quantized
// with block scales (MXFP8, NVFP4), or BF16, with a reason for each rule. It is an artifact like a
// plan: [Default] writes NVIDIA's recipes, a person reads and edits it, [Parse] reads it back. The
// precision monitor of a run adds rules on top ([Policy.Fall]) and removes them ([Policy.Return]).
//
//	{
//	  "version": 1,
//	  "layers": 32,
//	  "rules": [
//	    {
//	      "linears": ["attn", "mlp"],
//	      "layers": "all",
//	      "format": "mxfp8",
//	      "why": "Every linear layer of a block is in MXFP8."
//	    },
//	    {
//	      "linears": ["down"],
//	      "layers": "30-31",
//	      "products": ["fprop"],
//	      "format": "bf16",
//	      "why": "The outliers of the last two layers are tried in BF16."
//	    }
//	  ]
//	}
//
// Rules apply in their order and later ones win. What no rule names is in BF16.
package precision
