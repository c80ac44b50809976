package quantize

import (
	"maps"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// ctVersion is the release of compressed-tensors whose keys are written; testdata/make.py holds
// them to it.
const ctVersion = "0.20.0"

type object = map[string]any

// config is config.json with the quantization in it.
func (j *job) config() object {
	c := maps.Clone(j.src.config)
	// Without it transformers uses the type of the first tensor, which may be a scale.
	key := "dtype"
	if _, old := c["torch_dtype"]; old && c["dtype"] == nil {
		key = "torch_dtype"
	}
	c[key] = "bfloat16"
	if j.Layout == ModelOpt {
		c["quantization_config"] = j.modeloptConfig()
	} else {
		c["quantization_config"] = j.compressedConfig()
	}
	return c
}

// layers lists the modules that are quantized, by format, and those linear ones that are not. The
// head is among the latter even where it has no tensor of its own, being the embedding's: loaders
// would look for its scales.
func (j *job) layers() (quantized map[dtype.Format][]string, kept []string) {
	quantized = map[dtype.Format][]string{}
	kept = []string{"lm_head"}
	for _, f := range j.files {
		for _, w := range f.works {
			switch w := w.(type) {
			case *quantizedMatrix:
				quantized[w.format] = append(quantized[w.format], w.module)
			case *experts:
				quantized[dtype.NVFP4] = append(quantized[dtype.NVFP4], w.modules()...)
			case *keep:
				if w.module != "" {
					kept = append(kept, w.module)
				}
			}
		}
	}
	slices.Sort(kept)
	return quantized, slices.Compact(kept)
}

// compressedFormats are the names of compressed-tensors for what a module's tensors are.
var compressedFormats = map[dtype.Format]string{
	dtype.MXFP8: "mxfp8-quantized", dtype.NVFP4: "nvfp4-pack-quantized",
}

func (j *job) compressedConfig() object {
	quantized, kept := j.layers()
	format := ""
	if len(quantized) > 1 {
		format = "mixed-precision"
	}
	groups := groupsOf(quantized, func(f dtype.Format) object {
		if len(quantized) == 1 {
			format = compressedFormats[f]
		}
		return object{"weights": j.compressedArgs(f, false),
			"input_activations":  j.compressedArgs(f, true),
			"output_activations": nil, "format": compressedFormats[f]}
	})
	return object{"quant_method": "compressed-tensors", "format": format, "config_groups": groups,
		"ignore": kept, "kv_cache_scheme": nil, "quantization_status": "compressed",
		"global_compression_ratio": nil, "version": ctVersion}
}

// compressedArgs are the presets MXFP8, NVFP4 and NVFP4A16 of compressed-tensors.
func (j *job) compressedArgs(f dtype.Format, activations bool) any {
	args := object{"type": "float", "symmetric": true, "dynamic": activations}
	if f == dtype.MXFP8 {
		args["num_bits"], args["group_size"], args["strategy"] = 8, 32, "group"
		args["scale_dtype"], args["zp_dtype"] = "torch.uint8", "torch.uint8"
		return args
	}
	if activations && j.InputAmax == 0 {
		return nil
	}
	args["num_bits"], args["group_size"], args["strategy"] = 4, 16, "tensor_group"
	args["scale_dtype"], args["zp_dtype"] = "torch.float8_e4m3fn", "torch.float8_e4m3fn"
	if activations {
		args["dynamic"] = "local" // block scales at run time, the global one from the file
	}
	return args
}

// algo is modelopt's name of what a layer's weights are.
func (j *job) algo(f dtype.Format) string {
	switch {
	case f == dtype.MXFP8:
		return "MXFP8"
	case j.InputAmax == 0:
		return "W4A16_NVFP4"
	}
	return "NVFP4"
}

// producer tells who wrote a checkpoint. Loaders print it and decide nothing by it.
var producer = object{"name": "deepwell"}

// hfQuantConfig is hf_quant_config.json of modelopt's layout.
func (j *job) hfQuantConfig() object {
	quantized, kept := j.layers()
	q := object{"kv_cache_quant_algo": nil, "exclude_modules": kept}
	if len(quantized) == 1 {
		for f := range quantized {
			q["quant_algo"], q["group_size"] = j.algo(f), f.Block()
		}
	} else {
		layers := object{}
		for f, modules := range quantized {
			for _, m := range modules {
				layers[m] = object{"quant_algo": j.algo(f), "group_size": f.Block()}
			}
		}
		q["quant_algo"], q["quantized_layers"] = "MIXED_PRECISION", layers
	}
	return object{"producer": producer, "quantization": q}
}

// modeloptConfig is the same within config.json, under the names that it has there.
func (j *job) modeloptConfig() object {
	q := j.hfQuantConfig()["quantization"].(object)
	quantized, kept := j.layers()
	c := object{"quant_method": "modelopt", "producer": producer, "ignore": kept,
		"quant_algo": q["quant_algo"]}
	if layers := q["quantized_layers"]; layers != nil {
		c["quantized_layers"] = layers
	} else {
		c["group_size"] = q["group_size"]
	}
	c["config_groups"] = groupsOf(quantized, func(f dtype.Format) object {
		args := object{"dynamic": false, "num_bits": f.Codes().Bits(), "type": "float",
			"group_size": f.Block()}
		g := object{"weights": args}
		if j.algo(f) != "W4A16_NVFP4" {
			g["input_activations"] = args
		}
		return g
	})
	return c
}

// groupsOf lists the groups of a configuration: a format each, with the layers that have it.
func groupsOf(quantized map[dtype.Format][]string, group func(f dtype.Format) object) object {
	groups := object{}
	for i, f := range slices.Sorted(maps.Keys(quantized)) {
		g := group(f)
		if g["targets"] = quantized[f]; len(quantized) == 1 {
			g["targets"] = []string{"Linear"}
		}
		groups["group_"+string(rune('0'+i))] = g
	}
	return groups
}
