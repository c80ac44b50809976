package recipe

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// The words of precision and recompute.
var (
	precisions = append([]string{"f32", "bf16"}, lists.Map(dtype.Formats(),
		func(f dtype.Format) string { return string(f) })...)
	types = map[string]dtype.DType{"f32": dtype.F32, "bf16": dtype.BF16}
	tags  = []ir.Tag{ir.Embed, ir.Norm, ir.Attn, ir.MLP, ir.Router, ir.Experts, ir.Head}
)

// precision reads a type, a format of GEMMs or the path of a policy; or a pair of that and the
// share of the final steps in bf16.
func (p *reader) precision(v any) *problem {
	p.r.FinalBF16 = 0
	if list, ok := v.([]any); ok {
		if len(list) != 2 {
			return wrong(`write ["nvfp4", 0.15]`, "it is a list of %d, not of two", len(list))
		}
		share, bad := number(list[1], 0, 1)
		if bad != nil {
			return bad
		}
		v, p.r.FinalBF16 = list[0], share
	}
	p.r.Precision, p.r.GEMMs = dtype.BF16, ""
	var bad *problem
	if path, ok := v.(string); ok && strings.HasSuffix(path, ".json") {
		p.r.GEMMs, bad = p.complete("precision", path)
	} else if path, bad = word(v, precisions); bad == nil && types[path] == dtype.Invalid {
		p.r.GEMMs = path
	} else if bad == nil {
		p.r.Precision = types[path]
	}
	if bad == nil && p.r.FinalBF16 > 0 && p.r.GEMMs == "" {
		bad = wrong(`write ["nvfp4", 0.15]`, "%s is not lower than bf16", p.r.Precision)
	}
	return bad
}

func (r *Recipe) precision() string {
	if r.FinalBF16 > 0 {
		return "[" + r.format() + ", " + float(r.FinalBF16) + "]"
	}
	return r.format()
}

// format is the precision without its final phase, which may be asked for on resume.
func (r *Recipe) format() string {
	return quote(cmp.Or(r.spell("precision", r.GEMMs), r.Precision.String()))
}

func (p *reader) recompute(v any) *problem {
	const fix = `write "none", "full" or a list such as ["attn", "mlp"]`
	p.r.Recompute = nil
	list, ok := v.([]any)
	switch {
	case v == "full":
		p.r.Recompute = slices.Clone(ir.BlockTags)
	case v != "none" && !ok:
		return wrong(fix, "it is %s, not %q, %q or a list", kind(v), "none", "full")
	}
	for _, v := range list {
		name, _ := v.(string)
		if !slices.Contains(tags, ir.Tag(name)) {
			return wrong(fix, "%v is not one of %s", v, join(tags, ", "))
		}
		if !slices.Contains(p.r.Recompute, ir.Tag(name)) {
			p.r.Recompute = append(p.r.Recompute, ir.Tag(name))
		}
	}
	return nil
}

func (r *Recipe) recompute() string {
	switch {
	case len(r.Recompute) == 0:
		return `"none"`
	case slices.Equal(r.Recompute, ir.BlockTags):
		return `"full"`
	}
	return `["` + join(r.Recompute, `", "`) + `"]`
}

func pair(v any, low, high float64) (a, b float64, bad *problem) {
	list, ok := v.([]any)
	if !ok || len(list) != 2 {
		return 0, 0, wrong("write two numbers: [a, b]", "it is %s, not a pair", kind(v))
	}
	if a, bad = number(list[0], low, high); bad == nil {
		b, bad = number(list[1], low, high)
	}
	return a, b, bad
}

func printPair(a, b float64) string { return "[" + float(a) + ", " + float(b) + "]" }

// lr reads the peak learning rate, or [lr, min_lr].
func (p *reader) lr(v any) (bad *problem) {
	o := &p.r.Optimizer
	if _, p.hasMinLR = v.([]any); !p.hasMinLR {
		o.LR, bad = number(v, 0, 10)
		o.MinLR = minShare * o.LR
		return bad
	}
	if o.LR, o.MinLR, bad = pair(v, 0, 10); bad == nil && o.MinLR > o.LR {
		bad = wrong("write [lr, min_lr]", "min_lr, %s, is above lr, %s", float(o.MinLR), float(o.LR))
	}
	return bad
}

func (r *Recipe) lr() string { return printPair(r.Optimizer.LR, r.Optimizer.FinalLR()) }

func (p *reader) betas(v any) (bad *problem) {
	const high = 0.999999 // at 1, the bias correction would divide by zero
	p.r.Optimizer.Beta1, p.r.Optimizer.Beta2, bad = pair(v, 0, high)
	return bad
}

func (r *Recipe) betas() string { return printPair(r.Optimizer.Beta1, r.Optimizer.Beta2) }

// auxLoss reads a factor; the model's own is left out.
func (p *reader) auxLoss(v any) (bad *problem) {
	p.r.Experts.AuxLoss, bad = number(v, 0, 100)
	return bad
}

func (r *Recipe) auxLoss() string {
	if r.Experts.AuxLoss < 0 {
		return `""`
	}
	return float(r.Experts.AuxLoss)
}

// held reads the held-out data: a share of the training data, or a path.
func (p *reader) held(v any) *problem {
	s, bad := text(v)
	if bad != nil {
		return bad
	}
	share, isShare := strings.CutSuffix(s, "%")
	if !isShare {
		p.r.Eval.Path, bad = p.complete("eval.data", s)
		return bad
	}
	percent, err := strconv.ParseFloat(strings.TrimSpace(share), 64)
	if err != nil || !(percent > 0 && percent <= 50) {
		return wrong(`write a share such as "1%"`, "%s is not a share from 0 %% to 50 %%", quote(s))
	}
	p.r.Eval.Share = percent / 100
	p.r.written[spelling{"eval.data", float(percent / 100)}] = s
	return nil
}

func (r *Recipe) held() string {
	s := r.Eval.Share
	if s == 0 {
		return quote(r.spell("eval.data", r.Eval.Path))
	}
	if written := r.spell("eval.data", float(s)); written != float(s) {
		return quote(written)
	}
	return quote(strconv.FormatFloat(100*s, 'g', -1, 64) + "%")
}

// sources reads the datasets: a list of paths, or of tables.
func (p *reader) sources(v any) *problem {
	list, ok := v.([]any)
	switch s, single := v.(string); {
	case single:
		return wrong("write ["+quote(s)+"]", "it is %s, not a list", kind(v))
	case !ok:
		return wrong(`write a list of paths: ["a.txt"]`, "it is %s, not a list", kind(v))
	case len(list) == 0:
		return wrong(`write a list of paths: ["a.txt"]`, "it is empty")
	}
	for i, v := range list {
		p.item = i
		table, isTable := v.(map[string]any)
		if !isTable {
			table = map[string]any{"path": v}
		}
		s, bad := p.dataSource(table)
		if bad != nil {
			return bad
		}
		p.r.Data.Sources = append(p.r.Data.Sources, s)
	}
	return nil
}

// columns reads the names that a source gives to the columns of its rows.
func columns(v any) (chat.Columns, *problem) {
	const fix = `write columns = {prompt = "question", completion = "answer"}`
	table, ok := v.(map[string]any)
	if !ok || len(table) == 0 {
		return nil, wrong(fix, "columns is %s, not a table of names", kind(v))
	}
	list := chat.Columns{}
	for role, name := range table {
		var bad *problem
		if list[role], bad = text(name); bad != nil {
			return nil, bad
		}
	}
	if err := list.Check(); err != nil {
		e := diag.From(err)
		return nil, wrong(cmp.Or(e.Fix, fix), "%s", e.What)
	}
	return list, nil
}

func printColumns(list chat.Columns) string {
	parts := lists.Map(slices.Sorted(maps.Keys(list)), func(role string) string {
		return role + " = " + quote(list[role])
	})
	return "{" + strings.Join(parts, ", ") + "}"
}

var sourceType = reflect.TypeFor[Source]()

// sourceKeys are the keys of a table of data.sources, in the order of its fields.
var sourceKeys = func() (keys []string) {
	for f := range sourceType.Fields() {
		keys = append(keys, f.Tag.Get("key"))
	}
	return keys
}()

func (p *reader) dataSource(table map[string]any) (s Source, bad *problem) {
	for _, name := range sorted(table) {
		i := slices.Index(sourceKeys, name)
		if i < 0 {
			fix := "a source has " + strings.Join(sourceKeys, ", ")
			if near := diag.Nearest(name, sourceKeys); near != "" {
				fix = "did you mean " + quote(near) + "?"
			}
			bad = wrong(fix, "a source has no key %s", quote(name))
		} else if name == "columns" {
			s.Columns, bad = columns(table[name])
		} else {
			bad = p.scalar(reflect.ValueOf(&s).Elem().Field(i), sourceType.Field(i).Tag, "data.sources",
				table[name])
		}
		if bad == nil && name == "weight" && s.Weight == 0 {
			bad = wrong("take the source out", "a weight of 0 never gives a token")
		}
		if bad != nil {
			p.part = name
			return s, bad
		}
	}
	if s.Path == "" {
		return s, wrong(`add path = "…"`, "a source has no path")
	}
	return s, nil
}

// bare reports whether a source is a path and nothing else.
func (s Source) bare() bool { return reflect.DeepEqual(s, Source{Path: s.Path}) }

func (r *Recipe) sources() string {
	list := lists.Map(r.Data.Sources, func(s Source) string {
		if s.bare() {
			return quote(r.spell("data.sources", s.Path))
		}
		var parts []string
		for i, key := range sourceKeys {
			if f := reflect.ValueOf(s).Field(i); key == "columns" && len(s.Columns) > 0 {
				parts = append(parts, key+" = "+printColumns(s.Columns))
			} else if key != "columns" && !f.IsZero() {
				parts = append(parts, key+" = "+r.scalar(f, sourceType.Field(i).Tag, "data.sources"))
			}
		}
		return "{" + strings.Join(parts, ", ") + "}"
	})
	return "[" + strings.Join(list, ", ") + "]"
}
