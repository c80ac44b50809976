package recipe

import (
	"cmp"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A problem is what is wrong with a value. The key is known to the caller.
type problem struct{ what, fix string }

func wrong(fix, format string, args ...any) *problem {
	return &problem{fmt.Sprintf(format, args...), fix}
}

// maxInt bounds every integer, so that the product of any two does not overflow.
const maxInt = math.MaxInt32

// maxFloat bounds every number, since masters are f32.
const maxFloat = math.MaxFloat32

// scalar reads a TOML value into the field of a key; the tag bounds it.
func (p *reader) scalar(f reflect.Value, tag reflect.StructTag, key string, v any) (bad *problem) {
	in := tag.Get("in")
	low, high := bounds(in)
	switch at := f.Addr().Interface().(type) {
	case *int:
		*at, bad = whole(v, low, high)
	case *float64:
		*at, bad = number(v, low, high)
	case *dtype.DType:
		var name string
		if name, bad = word(v, precisions[:2]); bad == nil {
			*at = types[name]
		}
	case *string:
		switch kind := tag.Get("kind"); {
		case in != "":
			*at, bad = word(v, strings.Fields(in))
		default:
			if *at, bad = text(v); bad == nil && kind != "" {
				*at, bad = p.place(key, *at, kind == "source")
			}
		}
	}
	return bad
}

// scalar prints the field of a key as TOML.
func (r *Recipe) scalar(f reflect.Value, tag reflect.StructTag, key string) string {
	switch v := f.Interface().(type) {
	case float64:
		return float(v)
	case dtype.DType:
		return quote(v.String())
	case string:
		if tag.Get("kind") != "" {
			v = r.spell(key, v)
		}
		return quote(v)
	}
	return fmt.Sprint(f.Interface())
}

// bounds reads the tag "1..1024" or "1.."; numbers are at least 0.
func bounds(tag string) (low, high float64) {
	from, to, ranged := strings.Cut(tag, "..")
	if !ranged {
		return 0, maxFloat
	}
	low, _ = strconv.ParseFloat(from, 64)
	high, err := strconv.ParseFloat(to, 64)
	if err != nil {
		high = maxFloat
	}
	return low, high
}

func whole(v any, low, high float64) (int, *problem) {
	n, ok := v.(int64)
	high = min(high, maxInt)
	switch x := float64(n); {
	case !ok:
		return 0, wrong("write a whole number", "it is %s, not a whole number", kind(v))
	case x > high:
		return 0, wrong(fmt.Sprintf("give it %.0f or less", high), "%d is outside %.0f … %.0f", n, low,
			high)
	case x < low:
		return 0, wrong(fmt.Sprintf("give it %.0f or more", low), "%d is outside %.0f … %.0f", n, low,
			high)
	}
	return int(n), nil
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
	switch in := f >= low && f <= high; { // false for NaN, too
	case in:
		return f, nil
	case f > high && high == maxFloat && !math.IsInf(f, 0):
		return 0, wrong("give it less", "%s is more than an f32 holds", float(f))
	case high == maxFloat:
		return 0, wrong("give it "+float(low)+" or more", "%s is less than %s or not finite",
			float(f), float(low))
	}
	return 0, wrong("give it "+float(low)+" to "+float(high), "%s is outside %s … %s",
		float(f), float(low), float(high))
}

func text(v any) (string, *problem) {
	s, ok := v.(string)
	switch {
	case !ok:
		return "", wrong("write a string in quotes", "it is %s, not a string", kind(v))
	case s == "":
		return "", wrong("leave the key out, or give it a value", "it is empty")
	}
	return s, nil
}

// word accepts one of the words.
func word(v any, words []string) (string, *problem) {
	all := strings.Join(words, ", ")
	s, ok := v.(string)
	if !ok {
		return "", wrong("write one of "+all, "it is %s, not a string", kind(v))
	}
	if slices.Contains(words, s) {
		return s, nil
	}
	fix := "write one of " + all
	near := cmp.Or(otherNames[strings.ToLower(s)], diag.Nearest(strings.ToLower(s), words))
	if slices.Contains(words, near) {
		fix = "write " + quote(near)
	}
	return "", wrong(fix, "%s is not one of %s", quote(s), all)
}

// otherNames are what other programs call our words, where the letters would suggest a wrong one.
var otherNames = map[string]string{"fp8": "mxfp8", "float8": "mxfp8", "fp4": "nvfp4",
	"mxfp4": "nvfp4", "fp16": "bf16", "float16": "bf16", "half": "bf16", "bfloat16": "bf16",
	"fp32": "f32", "float32": "f32", "float": "f32", "tf32": "f32"}

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
	return `"` + b.String() + `"`
}

func join[S ~string](list []S, by string) string {
	return strings.Join(lists.Map(list, func(s S) string { return string(s) }), by)
}
