package recipe

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A reader checks one document and fills in one recipe.
type reader struct {
	path, dir string
	getenv    func(string) string
	r         *Recipe
	lines     []string          // the document's
	at        map[string]int    // key → its line, from 1
	set       map[string]string // key → the override that gave it
	errs      []found
	hasMinLR  bool // optimizer.lr is a pair
	batch     any  // the value of batch, for suggestions; nil if it is not given
	saved     bool // stored by a run: renamed keys are read, model and data.sources may be missing

	// Where in data.sources a problem was seen: the element and the key in it.
	item int
	part string
}

// found is an error with its place in the order in which a person reads the document.
type found struct {
	line int
	err  *diag.Error
}

// Parse reads a recipe. Errors name path, the file that the text is from; relative paths start at
// its folder, and getenv fills in $NAME. Overrides, such as "optimizer.lr=3e-4", replace values of
// the document and pass the same checks.
func Parse(data []byte, path string, overrides []string,
	getenv func(string) string) (*Recipe, error) {
	return parse(data, path, overrides, getenv, false)
}

func parse(data []byte, path string, overrides []string, getenv func(string) string,
	saved bool) (*Recipe, error) {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")) // the byte order mark of some editors
	p := &reader{path: path, dir: filepath.Dir(path), getenv: getenv, saved: saved,
		r: &Recipe{written: map[spelling]string{}}, lines: strings.Split(string(data), "\n"),
		at: map[string]int{}, set: map[string]string{}}
	doc, err := parseTOML(data)
	if err != nil {
		return nil, p.malformed(err)
	}
	p.locate(data)
	p.batch = doc["batch"]
	for _, o := range overrides {
		if text, ok := strings.CutPrefix(o, "batch="); ok {
			p.batch, _ = strconv.ParseInt(text, 10, 64)
		}
	}
	values := p.flatten(doc)
	for _, o := range overrides {
		if err := p.override(values, o); err != nil {
			return nil, err
		}
	}
	p.fill(values)
	p.length(values)
	p.derive(values)
	p.check()
	if err := p.report(); err != nil {
		return nil, err
	}
	return p.r, nil
}

// malformed locates the place where the text stops being TOML.
func (p *reader) malformed(err error) error {
	e := diag.New(diag.RecipeText, "%s is not TOML: %s", filepath.Base(p.path), err).
		At("%s", p.path)
	if at, ok := errors.AsType[*tomlError](err); ok && at.line > 0 {
		e = e.At("%s:%d:%d %s", p.path, at.line, at.column, p.line(at.line))
	}
	return e.Try("a value is a number, a \"string\", true, or a [list]; " +
		"deepwell train --example prints a whole recipe")
}

// line is the text of a line, short enough to be quoted.
func (p *reader) line(n int) string {
	if n < 1 || n > len(p.lines) {
		return ""
	}
	text := []rune(strings.TrimSpace(p.lines[n-1]))
	if len(text) > 60 {
		text = append(text[:59], '…')
	}
	return string(text)
}

// override puts the value of one --set over the document's.
func (p *reader) override(values map[string]any, text string) error {
	name, value, ok := strings.Cut(text, "=")
	name, value = strings.TrimSpace(name), strings.TrimSpace(value)
	if !ok || name == "" {
		return diag.New(diag.BadUsage, "--set %s has no value", text).
			Try("--set KEY=VALUE, for example --set optimizer.lr=3e-4")
	}
	if !utf8.ValidString(text) {
		return diag.New(diag.BadUsage, "--set %q is not UTF-8", text).Try("use UTF-8")
	}
	one, err := parseTOML([]byte("x = " + value))
	v := one["x"]
	_, isText := v.(string)
	switch r := find(name); {
	case err == nil && len(one) == 1:
		if r != nil && !isText && slices.Contains(textual, r.Type) {
			v = value // a name or path that looks like a number
		}
	case strings.ContainsAny(value[:min(1, len(value))], `[{"'`):
		return diag.New(diag.RecipeText, "the value of --set %s is not TOML", text).Wrap(err).
			Try("quote it for the shell: --set '%s'", text)
	default:
		v = value
	}
	p.set[name] = text
	// Of steps and epochs, the one that is set replaces the other one of the document.
	if other := map[string]string{"steps": "epochs", "epochs": "steps"}[name]; p.set[other] == "" {
		delete(values, other)
	}
	p.accept(values, name, v)
	return nil
}

// textual are the types that have only strings, so that an override needs no quotes.
var textual = []string{"string", "path", "source", "path or share"}

// flatten gives the values by their full names and refuses unknown names.
func (p *reader) flatten(doc map[string]any) map[string]any {
	values := map[string]any{}
	for _, name := range sorted(doc) {
		inside, isTable := doc[name].(map[string]any)
		if !isTable || !slices.Contains(sections, name) {
			p.accept(values, name, doc[name])
			continue
		}
		for _, key := range sorted(inside) {
			p.accept(values, name+"."+key, inside[key])
		}
	}
	return values
}

func (p *reader) accept(values map[string]any, name string, v any) {
	now := cmp.Or(renamed[name], name)
	_, isTable := v.(map[string]any)
	what, fix := fmt.Sprintf("there is no key %q", name), p.elsewhere(name, v)
	if fix == "" {
		fix = p.suggest(name)
	}
	switch {
	case now != name && !p.saved:
		what, fix = fmt.Sprintf("%s is now %s", name, now), "write "+now
	case find(now) != nil:
		values[now] = v
		return
	case slices.Contains(sections, name):
		what = name + " is a section, not a key"
		fix = fmt.Sprintf("write [%s] on a line of its own, and its keys below it", name)
	case isTable && !strings.Contains(name, "."):
		what = fmt.Sprintf("there is no section [%s]", name)
	}
	p.fail(diag.RecipeKey, name, what, fix)
}

// Keys of other programs whose meaning run.toml states in another way.
var (
	accumulations = []string{"gradient_accumulation_steps", "gradient_accumulation", "grad_accum",
		"grad_accum_steps", "grad_accumulation_steps", "accumulate_grad_batches"}
	parallelisms = []string{"parallelism", "dp", "ddp", "fsdp", "hsdp", "tp", "cp", "ep", "pp", "zero",
		"data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
		"context_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree",
		"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
		"expert_model_parallel_size"}
)

// elsewhere says how run.toml states what another program's key means; "" for keys that it does not
// know. A count of accumulation steps becomes the size of a microbatch.
func (p *reader) elsewhere(name string, v any) string {
	section, short := split(name)
	if section == "parallelism" || slices.Contains(parallelisms, short) {
		return "parallelism is in a plan: deepwell train --plan plan.json; deepwell plan writes one"
	}
	if !slices.Contains(accumulations, short) {
		return ""
	}
	const rule = "gradient accumulation steps = batch / microbatch"
	batch, known := p.batch.(int64)
	steps, whole := v.(int64)
	switch {
	case !known || batch < 1 || !whole || steps < 1:
		return rule + ": set microbatch"
	case batch%steps != 0:
		return fmt.Sprintf("%s, but %d steps do not divide batch = %d", rule, steps, batch)
	case p.set[name] != "":
		return fmt.Sprintf("%s: --set microbatch=%d with batch = %d", rule, batch/steps, batch)
	}
	return fmt.Sprintf("%s: microbatch = %d with batch = %d", rule, batch/steps, batch)
}

// suggest finds the key that was meant by an unknown name: one that other programs call so, the
// same key in another section, or one that is spelled nearly so.
func (p *reader) suggest(name string) string {
	section, short := split(name)
	here := lists.Filter(table, func(r *row) bool { return r.section() == section })
	var best *row
	for _, r := range append(slices.Clone(here), table...) {
		if best == nil && (r.short() == short || slices.Contains(r.also, short)) {
			best = r
		}
	}
	full := func(r *row) string { return r.Name }
	if best == nil {
		best = find(cmp.Or(diag.Nearest(name, lists.Map(here, full)),
			diag.Nearest(name, lists.Map(table, full))))
	}
	near := diag.Nearest(name, sections)
	switch {
	case best == nil && slices.Contains(sections, section):
		return fmt.Sprintf("[%s] has %s", section, strings.Join(lists.Map(here, (*row).short), ", "))
	case best == nil && near != "":
		return fmt.Sprintf("did you mean [%s]?", near)
	case best == nil:
		return "deepwell train --example prints every key"
	case p.set[name] != "":
		_, value, _ := strings.Cut(p.set[name], "=")
		return fmt.Sprintf("did you mean --set %s=%s?", best.Name, value)
	case best.section() == section:
		return fmt.Sprintf("did you mean %q?", best.short())
	case best.section() == "":
		return fmt.Sprintf("did you mean %q? It stands above the first [section]", best.short())
	}
	return fmt.Sprintf("did you mean %q in section [%s]?", best.short(), best.section())
}

func sorted(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }
