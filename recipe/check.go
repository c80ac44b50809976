package recipe

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// fill sets the fields that the document gives, and those that follow from others.
func (p *reader) fill(values map[string]any) {
	for _, k := range table {
		v, given := values[k.Name]
		if !given {
			if inCode := k.Name == "model" || k.Name == "data.sources"; k.Default == "" &&
				!(p.saved && inCode) {
				p.missing(k)
			}
			continue
		}
		if bad := k.set(p, v); bad != nil {
			p.fail(diag.RecipeValue, p.place(k.Name), k.Name+": "+bad.what, bad.fix)
		}
	}
	if _, given := values["out"]; !given {
		// The default is relative to the folder of run.toml, like any other path.
		p.r.Out, _ = p.complete("out", p.r.Out)
	}
	if _, given := values["microbatch"]; !given {
		p.r.Microbatch = p.r.Batch
	}
	o := &p.r.Optimizer
	if _, given := values["optimizer.warmup"]; !given {
		o.Warmup = min(o.Warmup, p.r.Steps)
	}
	if o.Schedule == "constant" && !p.hasMinLR {
		o.MinLR = o.LR
	}
}

// place is the most exact name that the position of a problem is known by.
func (p *reader) place(name string) string {
	if name != "data.sources" || p.set[name] != "" {
		return name
	}
	item := fmt.Sprintf("%s.%d", name, p.item)
	for _, exact := range []string{item + "." + p.part, item} {
		if p.at[exact] > 0 {
			return exact
		}
	}
	return name
}

func (p *reader) missing(k *row) {
	fix := fmt.Sprintf("add %s = %s", k.short(), k.sample)
	if s := k.section(); s != "" {
		fix = fmt.Sprintf("add %s = %s below [%s]", k.short(), k.sample, s)
	}
	p.errs = append(p.errs, found{len(p.lines) + 1,
		diag.New(diag.RecipeKey, "%s is not given", k.Name).At("%s", p.path).Try("%s", fix)})
}

// check refuses values that contradict each other. It runs only over values that are sound by
// themselves, or one mistake would be told twice.
func (p *reader) check() {
	if len(p.errs) > 0 {
		return
	}
	r, o := p.r, p.r.Optimizer
	if r.Batch%r.Microbatch != 0 {
		p.fail(diag.RecipeValue, "microbatch",
			fmt.Sprintf("microbatch = %d does not divide batch = %d", r.Microbatch, r.Batch),
			fmt.Sprintf("set microbatch to %d", divisor(r.Batch, r.Microbatch)))
	}
	if o.Warmup > r.Steps {
		p.fail(diag.RecipeValue, "optimizer.warmup",
			fmt.Sprintf("warmup = %d is more than steps = %d", o.Warmup, r.Steps),
			fmt.Sprintf("set warmup to %d, or steps to more", r.Steps/10))
	}
	p.checkSources()
	if o.Schedule == "constant" && o.MinLR != o.LR {
		p.fail(diag.RecipeValue, "optimizer.lr",
			fmt.Sprintf("a constant learning rate cannot go from %s to %s", float(o.LR), float(o.MinLR)),
			fmt.Sprintf("set lr to %s, or schedule to \"cosine\"", float(o.LR)))
	}
}

// checkSources refuses a mixture in which the share of some source is not defined, and chats that
// would be written in two ways.
func (p *reader) checkSources() {
	var weights int
	var template string
	list := p.r.Data.Sources
	for i, s := range list {
		p.item = i
		if s.Weight != 0 {
			weights++
		}
		if s.Template != "" && template != "" && s.Template != template {
			p.part = "template"
			p.fail(diag.RecipeValue, p.place("data.sources"),
				fmt.Sprintf("data.sources: chats have two templates, %q and %q", template, s.Template),
				"give all sources the same template")
		}
		template = cmp.Or(s.Template, template)
	}
	if weights != 0 && weights != len(list) {
		p.item = slices.IndexFunc(list, func(s Source) bool { return s.Weight == 0 })
		p.part = "path"
		p.fail(diag.RecipeValue, p.place("data.sources"),
			fmt.Sprintf("data.sources: %d of %d sources have a weight", weights, len(list)),
			"give every source a weight, or none to count them by their size")
	}
}

// divisor is the largest number up to n that divides whole.
func divisor(whole, n int) int {
	best := 1
	for d := 1; d*d <= whole; d++ {
		if whole%d != 0 {
			continue
		}
		for _, d := range []int{d, whole / d} {
			if d <= n {
				best = max(best, d)
			}
		}
	}
	return best
}

// fail notes an error at the place of a key.
func (p *reader) fail(code diag.Code, name, what, fix string) {
	e := diag.New(code, "%s", what).Try("%s", fix)
	line := p.at[name]
	override := p.set[name]
	if override == "" && line == 0 { // a default meets a value of the document
		e = e.At("%s", p.path)
	} else if override != "" {
		e = e.At("--set %s", override)
	} else {
		e = e.At("%s:%d %s", p.path, line, p.line(line))
	}
	p.errs = append(p.errs, found{line, e})
}

// report gives the first error in the order of the document; it mentions the others.
func (p *reader) report() error {
	if len(p.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(p.errs, func(a, b found) int { return a.line - b.line })
	others := lists.Map(p.errs[1:], func(f found) string {
		return fmt.Sprintf("also %s: %s; %s", f.err.Where, f.err.What, f.err.Fix)
	})
	e := p.errs[0].err
	if len(others) > 0 {
		e = e.Because("%s", strings.Join(others, "\n"))
	}
	return e
}
