package recipe

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A problem is what is wrong with a value. The key is known to the caller.
type problem struct{ what, fix string }

func wrong(fix, format string, args ...any) *problem {
	return &problem{fmt.Sprintf(format, args...), fix}
}

// maxInt bounds every integer, so that products of two of them do not overflow.
const maxInt = math.MaxInt32

// maxFloat bounds every number, since masters are f32.
const maxFloat = math.MaxFloat32

// maxDocument is the most that data.Options.Document takes, in MiB.
const maxDocument = 1024

// of makes the field of a value that has one place in a Recipe.
func of[T any](at func(*Recipe) *T, read func(any) (T, *problem), print func(T) string) field {
	return field{
		set: func(p *reader, v any) *problem {
			x, bad := read(v)
			if bad == nil {
				*at(p.r) = x
			}
			return bad
		},
		get: func(r *Recipe) string { return print(*at(r)) },
	}
}

func intKey(low, high int, at func(*Recipe) *int) field {
	return of(at, func(v any) (int, *problem) {
		n, ok := v.(int64)
		switch {
		case !ok:
			return 0, wrong("write a whole number", "it is %s, not a whole number", kind(v))
		case n > int64(high) && high < maxInt:
			return 0, wrong(fmt.Sprintf("give it %d or less", high), "%d is outside %d … %d", n, low,
				high)
		case n < int64(low) || n > int64(high):
			return 0, wrong(fmt.Sprintf("give it %d or more", low), "%d is outside %d … %d", n, low,
				high)
		}
		return int(n), nil
	}, strconv.Itoa)
}

func floatKey(low, high float64, at func(*Recipe) *float64) field {
	return of(at, func(v any) (float64, *problem) { return number(v, low, high) }, float)
}

// factorKey reads a limit in multiples of what is usual: 0 for none, or one that is high enough.
func factorKey(enough func(float64) bool, fix, otherwise string,
	at func(*Recipe) *float64) field {
	return of(at, func(v any) (float64, *problem) {
		x, bad := number(v, 0, maxFloat)
		if bad == nil && x != 0 && !enough(x) {
			bad = wrong(fix, "%s would %s", float(x), otherwise)
		}
		return x, bad
	}, float)
}

func number(v any, low, high float64) (float64, *problem) {
	var f float64
	switch n := v.(type) {
	case int64:
		f = float64(n)
	case float64:
		f = n
	default:
		return 0, wrong("write a number", "it is %s, not a number", kind(v))
	}
	if !(f >= low && f <= high) { // false for NaN, too
		if high == maxFloat {
			return 0, wrong("give it "+float(low)+" or more", "%s is less than %s or not finite",
				float(f), float(low))
		}
		return 0, wrong("give it "+float(low)+" to "+float(high), "%s is outside %s … %s",
			float(f), float(low), float(high))
	}
	return f, nil
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

func lrKey() field {
	return field{
		set: func(p *reader, v any) *problem {
			o := &p.r.Optimizer
			if _, list := v.([]any); !list {
				lr, bad := number(v, 0, 10)
				o.LR, o.MinLR = lr, minShare*lr
				return bad
			}
			lr, low, bad := pair(v, 0, 10)
			if bad == nil && low > lr {
				bad = wrong("write [lr, min_lr]", "min_lr, %s, is above lr, %s", float(low), float(lr))
			}
			o.LR, o.MinLR, p.hasMinLR = lr, low, true
			return bad
		},
		get: func(r *Recipe) string { return printPair(r.Optimizer.LR, r.Optimizer.MinLR) },
	}
}

func betasKey() field {
	const high = 0.999999 // a moment that never forgets has no bias correction
	return field{
		set: func(p *reader, v any) (bad *problem) {
			p.r.Optimizer.Beta1, p.r.Optimizer.Beta2, bad = pair(v, 0, high)
			return bad
		},
		get: func(r *Recipe) string { return printPair(r.Optimizer.Beta1, r.Optimizer.Beta2) },
	}
}

func wordKey(words []string, at func(*Recipe) *string) field {
	return of(at, func(v any) (string, *problem) { return word(v, words) }, quote)
}

// word accepts one of the words.
func word(v any, words []string) (string, *problem) {
	s, ok := v.(string)
	if !ok {
		return "", wrong("write one of "+join(words, ", "), "it is %s, not a string", kind(v))
	}
	if !slices.Contains(words, s) {
		fix := "write one of " + join(words, ", ")
		near := cmp.Or(otherNames[strings.ToLower(s)], diag.Nearest(strings.ToLower(s), words))
		if slices.Contains(words, near) {
			fix = "write " + quote(near)
		}
		return "", wrong(fix, "%s is not one of %s", quote(s), join(words, ", "))
	}
	return s, nil
}

// otherNames are what other programs call our words, where the letters would suggest a wrong one.
var otherNames = map[string]string{"fp8": "mxfp8", "float8": "mxfp8", "fp4": "nvfp4",
	"mxfp4": "nvfp4", "fp16": "bf16", "float16": "bf16", "half": "bf16", "bfloat16": "bf16",
	"fp32": "f32", "float32": "f32", "float": "f32", "tf32": "f32"}

// typeKey reads a type in which something is kept.
func typeKey(at func(*Recipe) *dtype.DType) field {
	return of(at, func(v any) (dtype.DType, *problem) {
		s, bad := word(v, precisions[:2])
		if bad != nil {
			return dtype.Invalid, bad
		}
		return [...]dtype.DType{dtype.F32, dtype.BF16}[slices.Index(precisions, s)], nil
	}, func(t dtype.DType) string { return quote(t.String()) })
}

// precisionKey reads a type, a format of products in few bits, which are those of a model in bf16,
// or the path of a policy; and perhaps the part of the run that is repaired.
func precisionKey() field {
	return field{
		set: func(p *reader, v any) *problem {
			p.r.FinalBF16 = 0
			if list, ok := v.([]any); ok {
				if len(list) != 2 {
					return wrong(`write ["nvfp4", 0.15]`, "it is a list of %d, not of two", len(list))
				}
				part, bad := number(list[1], 0, 1)
				if bad != nil {
					return bad
				}
				v, p.r.FinalBF16 = list[0], part
			}
			bad := p.gemmPrecision(v)
			if bad == nil && p.r.FinalBF16 > 0 && p.r.Products == "" {
				bad = wrong(`write ["nvfp4", 0.15]`, "%s has no fewer bits than bf16", p.r.Precision)
			}
			return bad
		},
		get: func(r *Recipe) string {
			if r.FinalBF16 > 0 {
				return "[" + r.gemmPrecision() + ", " + float(r.FinalBF16) + "]"
			}
			return r.gemmPrecision()
		},
	}
}

// precision is the key of what products are computed in, under which paths are remembered.
const precision = "precision"

// gemmPrecision spells what products are computed in.
func (r *Recipe) gemmPrecision() string {
	return quote(cmp.Or(r.spell(precision, r.Products), r.Precision.String()))
}

// gemmPrecision reads what products are computed in.
func (p *reader) gemmPrecision(v any) *problem {
	if path, ok := v.(string); ok && strings.HasSuffix(path, ".json") {
		full, bad := p.complete(precision, path)
		p.r.Precision, p.r.Products = dtype.BF16, full
		return bad
	}
	s, bad := word(v, precisions)
	if bad != nil {
		return bad
	}
	p.r.Precision, p.r.Products = dtype.BF16, ""
	switch s {
	case "f32":
		p.r.Precision = dtype.F32
	case "mxfp8", "nvfp4":
		p.r.Products = s
	}
	return nil
}

func recomputeKey() field {
	const fix = `write "none", "full" or a list such as ["attn", "mlp"]`
	names := lists.Map(tags, func(t ir.Tag) string { return string(t) })
	return field{
		set: func(p *reader, v any) *problem {
			list, ok := v.([]any)
			switch {
			case v == "none":
				p.r.Recompute = nil
			case v == "full":
				p.r.Recompute = slices.Clone(ir.BlockTags)
			case !ok:
				return wrong(fix, "it is %s, not %q, %q or a list", kind(v), "none", "full")
			}
			for _, v := range list {
				name, bad := word(v, names)
				if bad != nil {
					return wrong(fix, "%v is not one of %s", v, join(tags, ", "))
				}
				if tag := ir.Tag(name); !slices.Contains(p.r.Recompute, tag) {
					p.r.Recompute = append(p.r.Recompute, tag)
				}
			}
			return nil
		},
		get: func(r *Recipe) string {
			switch {
			case len(r.Recompute) == 0:
				return `"none"`
			case slices.Equal(r.Recompute, ir.BlockTags):
				return `"full"`
			}
			return `["` + join(r.Recompute, `", "`) + `"]`
		},
	}
}

// kind names the type of a TOML value as a person would.
func kind(v any) string {
	switch v := v.(type) {
	case string:
		return "the string " + quote(v)
	case int64:
		return fmt.Sprintf("the number %d", v)
	case float64:
		return "the number " + float(v)
	case bool:
		return fmt.Sprint(v)
	case []any:
		return fmt.Sprintf("a list of %d", len(v))
	case map[string]any:
		return "a table"
	}
	return "a date or time"
}

// float writes a number as TOML reads it back: with a point or an exponent.
func float(f float64) string {
	s := strconv.FormatFloat(f, 'g', -1, 64)
	if !strings.ContainsAny(s, ".eIN") {
		s += ".0"
	}
	return s
}

// quote writes a basic TOML string. Go's escapes are TOML's, but for \a, \v and \x.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range s {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, `\u%04x`, c)
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func join[S ~string](list []S, by string) string {
	texts := lists.Map(list, func(s S) string { return string(s) })
	return strings.Join(texts, by)
}
