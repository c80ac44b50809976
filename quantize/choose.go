package quantize

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/safetensors"
)

// A Policy chooses the format of a linear weight [rows, cols]: a format, or None and a short
// reason. module is the weight's name without ".weight".
type Policy func(module string, rows, cols int64) (dtype.Format, string)

// A choice is what becomes of one tensor.
type choice struct {
	tensor safetensors.Tensor
	module string // its layer; "" for what is no matrix of a linear layer
	format dtype.Format
	why    string // why it stays; "" for one that is quantized
	patron string // first of those that share a global scale; itself, where it has no siblings
}

// fused lists layers that loaders merge into one matrix: attention's Q, K and V, gate and up of an
// MLP under both names, and the two down-projections of multi-head latent attention. vLLM uses the
// largest of their global scales for all (compressed_tensors_w4a4_nvfp4.py), so they must share
// one.
var fused = [][]string{
	{"q_proj", "k_proj", "v_proj"},
	{"gate_proj", "up_proj"},
	{"w1", "w3"},
	{"q_a_proj", "kv_a_proj_with_mqa"},
}

// choose decides for every tensor of a source.
func choose(s *source, o Options) ([]choice, error) {
	used := make([]bool, len(o.Skip))
	list := make([]choice, len(s.tensors))
	for i, t := range s.tensors {
		c := &list[i]
		c.tensor, c.format = t, None
		module, isWeight := strings.CutSuffix(t.Name(), ".weight")
		if c.why = s.unfit(t, isWeight); c.why != "" {
			// A loader takes any other matrix for a linear layer's.
			if isWeight && len(t.Shape().Dims) == 2 && c.why != "embedding" && c.why != "norm" {
				c.module = module
			}
			continue
		}
		c.module, c.patron = module, module
		dims := t.Shape().Dims
		c.format, c.why = o.To, ""
		if o.Policy != nil {
			c.format, c.why = o.Policy(module, dims[0], dims[1])
		}
		for k, pattern := range o.Skip {
			if ok, _ := path.Match(pattern, module); ok || pattern == module {
				used[k], c.format, c.why = true, None, "--skip "+pattern
			}
		}
		if size := c.format.Block(); c.format != None && dims[1]%size != 0 {
			c.format, c.why = None, fmt.Sprintf("%d columns are no multiple of %d", dims[1], size)
		}
		if c.format == None && c.why == "" {
			c.why = "the policy keeps it"
		}
	}
	unite(list)
	return list, o.check(list, used)
}

// keptSource is why a checkpoint in MXFP4 has matrices that stay: what was kept stays kept.
const keptSource = "the source keeps it"

// unfit says why a tensor cannot be quantized whatever the policy; "" where it can.
func (s *source) unfit(t safetensors.Tensor, isWeight bool) string {
	shape, name := t.Shape(), t.Name()
	parts := strings.Split(name, ".")
	switch {
	case isEmbedding(parts):
		return "embedding"
	case isHead(strings.TrimSuffix(name, ".weight")):
		return "head"
	case strings.Contains(name, "norm") || strings.HasPrefix(last(parts), "ln_"):
		return "norm"
	case isRouter(parts):
		return "router"
	case slices.ContainsFunc(parts, isSense):
		return "not of the language model"
	case s.mxfp4 && isWeight && len(shape.Dims) == 2:
		return keptSource
	case !isWeight || len(shape.Dims) != 2:
		return "no matrix of a linear layer"
	case s.config["model_type"] == "gpt2" || s.config["model_type"] == "openai-gpt":
		return "Conv1D has it as in × out"
	case !slices.Contains([]dtype.DType{dtype.BF16, dtype.F16, dtype.F32}, shape.Type):
		return "its element type is not quantized"
	}
	return ""
}

// last is the name of the module that a tensor belongs to.
func last(parts []string) string { return parts[max(0, len(parts)-2)] }

func isEmbedding(parts []string) bool {
	m := last(parts)
	return strings.Contains(m, "embed") && m != "embed_out" || m == "wte" || m == "wpe"
}

func isHead(module string) bool {
	switch module[strings.LastIndexByte(module, '.')+1:] {
	case "lm_head", "embed_out", "score", "classifier":
		return true
	}
	return module == "output"
}

func isRouter(parts []string) bool {
	m := last(parts)
	return m == "gate" || m == "shared_expert_gate" || slices.Contains(parts, "router")
}

// isSense knows the parts of a model that see and hear; loaders keep them in 16 bits.
func isSense(part string) bool {
	return strings.HasPrefix(part, "vision") || strings.HasPrefix(part, "visual") ||
		strings.HasPrefix(part, "audio") || part == "multi_modal_projector"
}

// siblings gives the modules that a loader puts together with this one, itself among them.
func siblings(module string) []string {
	at := strings.LastIndexByte(module, '.') + 1
	for _, set := range fused {
		if slices.Contains(set, module[at:]) {
			return lists.Map(set, func(n string) string { return module[:at] + n })
		}
	}
	return nil
}

// unite gives siblings one patron, and keeps all of them where one is kept.
func unite(list []choice) {
	before := map[string]choice{}
	for _, c := range list {
		if c.patron != "" {
			before[c.module] = c
		}
	}
	for i := range list {
		c := &list[i]
		if c.patron == "" {
			continue
		}
		first := true
		for _, name := range siblings(c.module) {
			other, ok := before[name]
			if !ok {
				continue
			}
			if first {
				c.patron, first = name, false
			}
			if c.why == "" && other.format != c.format {
				short := name[strings.LastIndexByte(name, '.')+1:]
				c.format, c.why = None, "is fused with "+short+", which is "+other.fate()
			}
		}
	}
}

func (c choice) fate() string {
	if c.why != "" {
		return "kept"
	}
	return string(c.format)
}

// check refuses patterns that match nothing and work that comes to nothing.
func (o *Options) check(list []choice, used []bool) error {
	var modules []string
	some := false
	for _, c := range list {
		some = some || c.format != None
		if c.patron != "" {
			modules = append(modules, c.module)
		}
	}
	for i, pattern := range o.Skip {
		if _, err := path.Match(pattern, ""); err != nil {
			return diag.New(diag.BadUsage, "%q is not a pattern", pattern).Wrap(err)
		}
		if used[i] {
			continue
		}
		return diag.New(diag.BadUsage, "no linear layer matches %q", pattern).
			Meant(pattern, modules, "did you mean %s?",
				"a pattern is a module's whole name, with * for any letters")
	}
	if some || slices.ContainsFunc(list, func(c choice) bool { return c.why == keptSource }) {
		return nil
	}
	return diag.New(diag.WeightType, "there is nothing to quantize: all tensors are kept").
		Because("%s", kept(list))
}

// kept counts the reasons, the most frequent first.
func kept(list []choice) string {
	counts := map[string]int{}
	var reasons []string
	for _, c := range list {
		if counts[c.why]++; counts[c.why] == 1 {
			reasons = append(reasons, c.why)
		}
	}
	slices.SortFunc(reasons, func(a, b string) int {
		return cmp.Or(counts[b]-counts[a], strings.Compare(a, b))
	})
	for i, r := range reasons {
		reasons[i] = fmt.Sprintf("%s: %d", r, counts[r])
	}
	return strings.Join(reasons, ", ")
}
