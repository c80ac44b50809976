package plan

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/schedule"
)

// Parse reads a plan. What is not said is as [Default] has it; what is said must be known. Errors
// name path, the file that the text is from. A plan that was read has not been checked against a
// model ([Plan.Check]).
func Parse(data []byte, path string) (*Plan, error) {
	r := &reader{data: data, path: path, d: json.NewDecoder(bytes.NewReader(data))}
	r.d.UseNumber()
	p := Default()
	r.object("", r.fields(p))
	if r.err == nil {
		if _, err := r.d.Token(); err == nil {
			r.fail(diag.PlanText, "something follows the plan")
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	if p.FSDP.Zero < 3 {
		p.FSDP.Gather = "step"
	}
	return p, nil
}

// A reader walks through a document. It keeps the first error.
type reader struct {
	data []byte
	path string
	d    *json.Decoder
	key  string // where it is, such as fsdp.zero
	err  *diag.Error
}

// fields says what each key of a plan sets.
func (r *reader) fields(p *Plan) map[string]func() {
	version := Version
	return map[string]func(){
		"version": func() {
			r.whole(&version, 1)
			if version != Version && r.err == nil {
				r.fail(diag.PlanVersion, "the plan has version %d; this binary reads %d", version, Version)
			}
		},
		"model":        func() { r.text(&p.Model) },
		"cluster":      func() { r.text(&p.Cluster) },
		"seq":          func() { r.count(&p.Seq) },
		"batch":        func() { r.count(&p.Batch) },
		"microbatches": func() { r.count(&p.Microbatches) },
		"dp":           func() { r.count(&p.DP) },
		"ep":           func() { r.count(&p.EP) },
		"fsdp": func() {
			r.axis(&p.FSDP.Size, map[string]func(){
				"zero":   func() { r.zero(&p.FSDP.Zero) },
				"gather": func() { r.word(&p.FSDP.Gather, gathers) },
			})
		},
		"tp": func() {
			r.axis(&p.TP.Size, map[string]func(){
				"sequence": func() { r.flag(&p.TP.Sequence) },
				"overlap":  func() { r.flag(&p.TP.Overlap) },
			})
		},
		"cp": func() {
			r.axis(&p.CP.Size, map[string]func(){
				"kind":    func() { r.word(&p.CP.Kind, contexts) },
				"balance": func() { r.flag(&p.CP.Balance) },
			})
		},
		"pp": func() {
			r.axis(&p.PP.Size, map[string]func(){
				"virtual":  func() { r.count(&p.PP.Virtual) },
				"schedule": func() { r.word(&p.PP.Schedule, schedule.Names()) },
			})
		},
		"recompute": func() {
			for _, tag := range r.words(recompute) {
				p.Recompute = append(p.Recompute, ir.Tag(tag))
			}
		},
		"offload": func() { p.Offload = r.words(offloads) },
		"types": func() {
			r.object("types", map[string]func(){
				"params":      func() { r.float(&p.Types.Params) },
				"grads":       func() { r.float(&p.Types.Grads) },
				"collectives": func() { r.float(&p.Types.Collectives) },
			})
		},
		"precision": func() { r.word(&p.Precision, precisions) },
		"order":     func() { r.order(&p.Order) },
	}
}

// fail keeps the first error, with the line that the reader has come to.
func (r *reader) fail(code diag.Code, format string, args ...any) {
	if r.err != nil {
		return
	}
	at := min(int(r.d.InputOffset()), len(r.data))
	line := 1 + bytes.Count(bytes.TrimRight(r.data[:at], " \t\r\n"), []byte("\n"))
	r.err = diag.New(code, format, args...).At("%s:%d %s", r.path, line, r.key)
}

func (r *reader) fix(format string, args ...any) {
	if r.err != nil && r.err.Fix == "" {
		r.err = r.err.Try(format, args...)
	}
}

// next reads one token; nil after an error.
func (r *reader) next() json.Token {
	if r.err != nil {
		return nil
	}
	t, err := r.d.Token()
	if err != nil {
		r.fail(diag.PlanText, "the plan is not JSON: %v", err)
	}
	return t
}

// object reads an object whose keys are those of fields, each at most once.
func (r *reader) object(name string, fields map[string]func()) {
	if t := r.next(); t != json.Delim('{') {
		r.wrong(t, "an object")
		return
	}
	r.members(name, fields)
}

func (r *reader) members(name string, fields map[string]func()) {
	outer := r.key
	seen := map[string]bool{}
	for r.err == nil && r.d.More() {
		key, _ := r.next().(string)
		r.key = strings.TrimPrefix(name+"."+key, ".")
		read := fields[key]
		switch {
		case r.err != nil:
		case seen[key]:
			r.fail(diag.PlanKey, "the key %q stands twice", r.key)
		case read == nil:
			r.unknown(key, fields)
		default:
			read()
		}
		seen[key] = true
	}
	r.next() // the brace
	r.key = outer
}

func (r *reader) unknown(key string, fields map[string]func()) {
	var names []string
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	r.fail(diag.PlanKey, "there is no key %q", r.key)
	if near := diag.Nearest(key, names); near != "" {
		r.fix("did you mean %q?", near)
	} else {
		r.fix("the keys here are %s", strings.Join(names, ", "))
	}
}

// wrong says that a value is not of the kind that it should be.
func (r *reader) wrong(got json.Token, want string) {
	r.fail(diag.PlanValue, "%s is %s, not %s", cmp.Or(r.key, "the plan"), spell(got), want)
}

func spell(t json.Token) string {
	switch x := t.(type) {
	case string:
		return strconv.Quote(x)
	case json.Delim:
		return "an object or a list"
	case nil:
		return "null"
	}
	return fmt.Sprint(t)
}

// axis reads the size of an axis, or an object that has it beside other keys.
func (r *reader) axis(size *int64, fields map[string]func()) {
	t := r.next()
	if t == json.Delim('{') {
		fields["size"] = func() { r.count(size) }
		r.members(r.key, fields)
		return
	}
	r.setCount(t, size)
}

// maxCount bounds sizes, so that products of them stay within an int64.
const maxCount = 1 << 24

func (r *reader) count(into *int64) { r.setCount(r.next(), into) }

func (r *reader) setCount(t json.Token, into *int64) {
	n, ok := t.(json.Number)
	v, err := strconv.ParseInt(string(n), 10, 64)
	if !ok || err != nil || v < 1 || v > maxCount {
		r.wrong(t, fmt.Sprintf("a whole number from 1 to %d", maxCount))
		return
	}
	*into = v
}

func (r *reader) whole(into *int, least int) {
	t := r.next()
	n, ok := t.(json.Number)
	v, err := strconv.Atoi(string(n))
	if !ok || err != nil || v < least {
		r.wrong(t, "a whole number")
		return
	}
	*into = v
}

func (r *reader) zero(into *int) {
	r.whole(into, 1)
	if r.err == nil && *into > 3 {
		r.fail(diag.PlanValue, "%s is %d, not 1, 2 or 3", r.key, *into)
	}
}

func (r *reader) text(into *string) {
	t := r.next()
	s, ok := t.(string)
	if !ok {
		r.wrong(t, "a text")
		return
	}
	*into = s
}

func (r *reader) flag(into *bool) {
	t := r.next()
	b, ok := t.(bool)
	if !ok {
		r.wrong(t, "true or false")
		return
	}
	*into = b
}

func (r *reader) word(into *string, known []string) {
	t := r.next()
	s, ok := t.(string)
	if !ok || !slices.Contains(known, s) {
		r.wrong(t, "one of "+strings.Join(known, ", "))
		if near := diag.Nearest(s, known); near != "" {
			r.fix("did you mean %q?", near)
		}
		return
	}
	*into = s
}

// words reads a list of different words.
func (r *reader) words(known []string) (list []string) {
	if t := r.next(); t != json.Delim('[') {
		r.wrong(t, "a list of "+strings.Join(known, ", "))
		return nil
	}
	for r.err == nil && r.d.More() {
		var s string
		r.word(&s, known)
		if r.err == nil && slices.Contains(list, s) {
			r.fail(diag.PlanValue, "%s has %q twice", r.key, s)
		}
		list = append(list, s)
	}
	r.next()
	return list
}

func (r *reader) float(into *dtype.DType) {
	var s string
	r.word(&s, []string{dtype.F32.String(), dtype.BF16.String()})
	if d, err := dtype.Parse(s); err == nil {
		*into = d
	}
}

// order reads all axes, or those that matter: the others come before them, where they make no
// difference because they have one device.
func (r *reader) order(into *[]string) {
	given := r.words(order)
	list := slices.Clone(given)
	for _, axis := range slices.Backward(order) {
		if !slices.Contains(given, axis) {
			list = slices.Insert(list, 0, axis)
		}
	}
	*into = list
}
