// Package precision turns a recipe's word for a precision into what each product of a model is
// computed in, and a graph into one that computes it so.
//
// A linear layer is three products: the forward one (fprop), the gradient of its input (dgrad) and
// that of its weight (wgrad). A [Policy] says for every layer which of them multiply numbers in
// blocks with scales (MXFP8, NVFP4) and which do not, and gives a reason for each of its rules. It
// is an artifact like a plan: [Default] writes the one of NVIDIA's recipes, a person reads and
// edits it, [Parse] reads it back. A run that sees trouble puts rules on top of it ([Policy.Fall])
// and takes them off again ([Policy.Return]).
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
