package recipe

import (
	_ "embed" // for keys.txt
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
)

// A Key is one key of run.toml, as the reference page shows it.
type Key struct {
	Name    string // with its section: optimizer.lr
	Type    string
	Default string // as TOML, or in words; "" if it must be given
	Doc     string
}

// A row is a key with what reading, printing and resuming need to know of it.
type row struct {
	Key
	sample string   // what the example gives it; "" leaves it at its default, as a comment
	also   []string // what other programs call it, for "did you mean"
	index  []int    // of its field in a Recipe
	tag    reflect.StructTag
	codec  codec
}

// A codec reads and prints a value that is not one scalar. kept prints the part of the value that a
// resumed run must keep, if that is not all of it.
type codec struct {
	set  func(*reader, any) *problem
	get  func(*Recipe) string
	kept func(*Recipe) string
}

// codecs are the values that set several fields, or a list.
var codecs = map[string]codec{
	"precision":        {(*reader).precision, (*Recipe).precision, (*Recipe).format},
	"recompute":        {set: (*reader).recompute, get: (*Recipe).recompute},
	"optimizer.lr":     {set: (*reader).lr, get: (*Recipe).lr},
	"optimizer.betas":  {set: (*reader).betas, get: (*Recipe).betas},
	"experts.aux_loss": {set: (*reader).auxLoss, get: (*Recipe).auxLoss},
	"data.sources":     {set: (*reader).sources, get: (*Recipe).sources},
	"eval.data": {(*reader).held, (*Recipe).held,
		func(r *Recipe) string { return float(r.Eval.Share) }},
}

// Keys lists the keys of run.toml in the order of the reference page.
func Keys() []Key {
	return lists.Map(table, func(k *row) Key { return k.Key })
}

// split gives the section of a key, "" above the first one, and its name there.
func split(name string) (section, short string) {
	i := strings.LastIndexByte(name, '.')
	return name[:max(i, 0)], name[i+1:]
}

func (k *row) section() string { s, _ := split(k.Name); return s }
func (k *row) short() string   { _, s := split(k.Name); return s }

// free reports whether a resumed run may change the value: it decides how long, how often or where,
// not what is computed.
func (k *row) free() bool { return k.tag.Get("resume") == "free" }

// toml is the default as TOML, and what words say beside it.
func (k *row) toml() (value, words string) {
	if k.Default == "" || !strings.ContainsAny(k.Default[:1], `"[0123456789`) {
		return "", k.Default
	}
	value, words, _ = strings.Cut(k.Default, ", or")
	return value, words
}

func (k *row) set(p *reader, v any) *problem {
	if k.codec.set != nil {
		return k.codec.set(p, v)
	}
	return p.scalar(reflect.ValueOf(p.r).Elem().FieldByIndex(k.index), k.tag, k.Name, v)
}

func (k *row) get(r *Recipe) string {
	if k.codec.get != nil {
		return k.codec.get(r)
	}
	return r.scalar(reflect.ValueOf(r).Elem().FieldByIndex(k.index), k.tag, k.Name)
}

// kept is the part of the value that a resumed run must not change, or "".
func (k *row) kept(r *Recipe) string {
	switch {
	case k.free():
		return ""
	case k.codec.kept != nil:
		return k.codec.kept(r)
	}
	return k.get(r)
}

func find(name string) *row {
	return lists.Find(table, func(r *row) bool { return r.Name == name })
}

// renamed gives the present name of keys that had another one. Recipes that runs have stored under
// old names are still read ([Saved]); in run.toml and in overrides they are errors.
var renamed = map[string]string{
	"micro":           "microbatch",
	"optimizer.rate":  "optimizer.lr",
	"optimizer.decay": "optimizer.weight_decay",
	"optimizer.clip":  "optimizer.max_grad_norm",
}

//go:embed keys.txt
var keysText string

// table is the whole of run.toml. keys.txt has a paragraph for each key: its name, type, default as
// TOML or in words (none if it must be given), what the example gives it, and what other programs
// call it; then what it means. The struct tag of its field says the rest.
var table = func() (rows []*row) {
	fields := tagged(reflect.TypeFor[Recipe](), nil)
	words := strings.NewReplacer("\n", " ", "{tags}", join(tags, ", "))
	for paragraph := range strings.SplitSeq(strings.TrimSpace(keysText), "\n\n") {
		head, doc, _ := strings.Cut(paragraph, "\n")
		cells := lists.Map(strings.Split(head, " | "), strings.TrimSpace)
		key := Key{cells[0], cells[1], cells[2], words.Replace(doc)}
		f := fields[key.Name]
		rows = append(rows, &row{key, cells[3], strings.Fields(cells[4]), f.Index, f.Tag,
			codecs[key.Name]})
	}
	return rows
}()

// tagged gives the fields that have a key, also in nested structs, with their whole index.
func tagged(t reflect.Type, at []int) map[string]reflect.StructField {
	fields := map[string]reflect.StructField{}
	for i := range t.NumField() {
		f := t.Field(i)
		f.Index = append(slices.Clone(at), i)
		if key := f.Tag.Get("key"); key != "" {
			fields[key] = f
		} else if f.Type.Kind() == reflect.Struct {
			maps.Copy(fields, tagged(f.Type, f.Index))
		}
	}
	return fields
}

// sections are the names of the sections.
var sections = slices.Compact(lists.Pick(table, func(k *row) (string, bool) {
	return k.section(), k.section() != ""
}))
