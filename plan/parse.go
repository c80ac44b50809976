package plan

import (
	"encoding/json"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/schedule"
)

// Parse reads a plan. Missing keys default to [Default]; unknown keys are errors. path is the
// file's name for error messages. Parse does not check the plan against a model: see [Plan.Check].
func Parse(data []byte, path string) (*Plan, error) {
	r := reader{strictjson.New(format, data, path)}
	p := Default()
	r.Object(r.fields(p)...)
	if r.OK() && p.Devices() > maxCount {
		r.Fail(diag.PlanValue, "%s are more than %d devices", p.Label(), maxCount)
		r.Fix("choose sizes whose product is the number of devices")
	}
	if err := r.End(); err != nil {
		return nil, err
	}
	if p.FSDP.Zero < 3 {
		p.FSDP.Gather = "step"
	}
	return p, nil
}

var format = strictjson.Format{Name: "plan", Text: diag.PlanText, Key: diag.PlanKey,
	Value: diag.PlanValue, Inner: map[string]string{
		"zero": "fsdp.zero", "gather": "fsdp.gather",
		"schedule": "pp.schedule", "virtual": "pp.virtual",
		"sequence": "tp.sequence", "overlap": "tp.overlap",
		"kind": "cp.kind", "balance": "cp.balance", "inner": "cp.inner",
		"params": "types.params", "grads": "types.grads", "collectives": "types.collectives",
	}}

type (
	reader struct{ *strictjson.Reader }
	field  = strictjson.Field
)

// fields lists what each key of a plan sets.
func (r reader) fields(p *Plan) []field {
	return []field{
		r.count("batch", &p.Batch),
		r.text("cluster", &p.Cluster),
		r.word("attention", &p.Attention, attentions),
		r.word("compile", &p.Compile, compiles),
		r.axis("cp", &p.CP.Size, r.flag("balance", &p.CP.Balance),
			r.word("kind", &p.CP.Kind, contexts), r.count("inner", &p.CP.Inner)),
		r.count("documents", &p.Documents),
		r.count("dp", &p.DP),
		r.count("ep", &p.EP),
		r.word("ep_kind", &p.EPKind, exchanges),
		r.flag("ep_overlap", &p.EPOverlap),
		r.flag("ep_save", &p.EPSave),
		r.fsdp(&p.FSDP),
		r.count("microbatches", &p.Microbatches),
		r.text("model", &p.Model),
		{Name: "offload", Read: func() { p.Offload = r.Words("", offloads) }},
		{Name: "order", Read: func() { p.Order = r.order() }},
		r.axis("pp", &p.PP.Size, r.word("schedule", &p.PP.Schedule, schedule.Names()),
			r.count("virtual", &p.PP.Virtual)),
		r.word("precision", &p.Precision, precisions),
		{Name: "recompute", Read: func() { p.Recompute = r.recompute() }},
		r.count("seq", &p.Seq),
		{Name: "slots", Read: func() { p.Slots = r.numbers() }},
		r.axis("tp", &p.TP.Size, r.flag("overlap", &p.TP.Overlap),
			r.flag("sequence", &p.TP.Sequence)),
		{Name: "types", Read: func() {
			r.Object(r.float("collectives", &p.Types.Collectives),
				r.float("grads", &p.Types.Grads), r.float("params", &p.Types.Params))
		}},
		{Name: "version", Read: func() {
			if v := r.Whole(1, math.MaxInt64, "a whole number"); v != Version && r.OK() {
				r.Fail(diag.PlanVersion, "the plan has version %d; this binary reads %d", v, Version)
			}
		}},
	}
}

// gather reads a gather's lifetime. Plans of Deepwell up to 3c16e73 say micro for microbatch.
func (r reader) gather() string {
	word := r.Word(append(slices.Clip(gathers), oldMicrobatch))
	if word == oldMicrobatch {
		return GatherMicrobatch
	}
	return word
}

const oldMicrobatch = "micro"

// fsdp reads the fsdp axis. With zero 1 and 2 parameters are whole for the step, so a gather other
// than step contradicts them.
func (r reader) fsdp(into *FSDP) field {
	stated := ""
	axis := r.axis("fsdp", &into.Size, field{Name: "gather",
		Read: func() { stated = r.gather() }}, field{Name: "zero",
		Read: func() { into.Zero = int(r.Whole(1, 3, "1, 2 or 3")) }})
	return field{Name: axis.Name, Read: func() {
		axis.Read()
		if stated == "" || !r.OK() {
			return
		}
		if into.Gather = stated; into.Zero < 3 && stated != GatherStep {
			r.Fail(diag.PlanValue, "gather applies to zero 3 only")
			r.Fix("\"zero\": 3, or no gather with zero %d", into.Zero)
		}
	}}
}

// recompute reads "none", "full" or a list of tags, as run.toml has them.
func (r reader) recompute() []ir.Tag {
	switch t := r.Next(); t {
	case "none":
		return nil
	case "full":
		return slices.Clone(ir.BlockTags)
	default:
		words := r.AsWords(t, `"none", "full" or a list of `+strings.Join(recompute, ", "), recompute)
		return lists.Map(words, func(s string) ir.Tag { return ir.Tag(s) })
	}
}

// numbers reads a list of numbers; [Plan.Check] holds them to growing ones.
func (r reader) numbers() (list []float64) {
	const want = "a list of numbers from 1 on, such as [1.25, 2]"
	r.List(want, func(int) {
		t := r.Next()
		n, _ := t.(json.Number)
		x, err := n.Float64()
		if err != nil || !(x >= 1) {
			r.Wrong(t, "a number from 1 on")
		}
		list = append(list, x)
	})
	return list
}

// maxCount bounds sizes and the number of devices, so that the product of two fits an int64.
const maxCount = 1 << 24

func (r reader) count(name string, into *int64) field {
	return field{Name: name, Read: func() { *into = r.Whole(1, maxCount, "") }}
}

func (r reader) text(name string, into *string) field {
	return field{Name: name, Read: func() { *into = r.Text() }}
}

func (r reader) flag(name string, into *bool) field {
	return field{Name: name, Read: func() { *into = r.Flag() }}
}

func (r reader) word(name string, into *string, known []string) field {
	return field{Name: name, Read: func() { *into = r.Word(known) }}
}

// axis reads the size of an axis, or an object with its size and other keys.
func (r reader) axis(name string, size *int64, fields ...field) field {
	return field{Name: name, Read: func() {
		if t := r.Next(); t != json.Delim('{') {
			*size = r.AsWhole(t, 1, maxCount, "")
			return
		}
		fields = append(fields, r.count("size", size))
		lists.Sort(fields, func(a, b field) int { return strings.Compare(a.Name, b.Name) })
		r.Members(fields...)
	}}
}

func (r reader) float(name string, into *dtype.DType) field {
	return field{Name: name, Read: func() {
		*into, _ = dtype.Parse(r.Word([]string{dtype.F32.String(), dtype.BF16.String()}))
	}}
}

// order reads the axes from the outermost. Axes that are not listed come first; they must have one
// device, so their place makes no difference.
func (r reader) order() []string {
	given := r.Words("", order)
	list := slices.Clone(given)
	for _, axis := range slices.Backward(order) {
		if !slices.Contains(given, axis) {
			list = slices.Insert(list, 0, axis)
		}
	}
	return list
}
