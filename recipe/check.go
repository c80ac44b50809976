package recipe

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
)

// fill sets every field: to the value of the document, or to its default.
func (p *reader) fill(values map[string]any) {
	p.r.Experts.AuxLoss = -1
	for _, k := range table {
		v, given := values[k.Name]
		text, _ := k.toml()
		switch {
		case given:
		case text != "":
			v = fromTOML(text)
		default:
			p.missing(k)
			continue
		}
		if bad := k.set(p, v); bad != nil {
			p.fail(diag.RecipeValue, p.exact(k.Name), k.Name+": "+bad.what, bad.fix)
		}
	}
	if _, given := values["optimizer.lr"]; !given {
		p.r.Optimizer.MinLR = -1
		p.r.Optimizer.MinLR = p.r.Optimizer.FinalLR()
	}
}

// derive sets the defaults that depend on other values.
func (p *reader) derive(values map[string]any) {
	o := &p.r.Optimizer
	if _, given := values["microbatch"]; !given {
		p.r.Microbatch = p.r.Batch
	}
	// Steps that epochs will say are not known yet.
	if _, given := values["optimizer.warmup"]; !given && p.r.Steps > 0 {
		o.Warmup = min(o.Warmup, p.r.Steps)
	}
	if o.Schedule == "constant" && !p.hasMinLR {
		o.MinLR = o.LR
	}
}

// length refuses a run that has neither steps nor epochs, or both. A run that is stored has the
// steps that its epochs were.
func (p *reader) length(values map[string]any) {
	_, hasSteps := values["steps"]
	_, hasEpochs := values["epochs"]
	switch {
	case hasSteps && hasEpochs && !p.saved:
		p.fail(diag.RecipeValue, "epochs", "steps and epochs are both given", "remove one of them")
	case !hasSteps && !hasEpochs:
		p.lacks(find("steps"))
	case hasEpochs && p.r.Epochs == 0 && len(p.errs) == 0:
		p.fail(diag.RecipeValue, "epochs", "epochs: 0 never gives a token", "give it 1, or more")
	}
}

// fromTOML reads one value, or nil.
func fromTOML(text string) any {
	one, err := parseTOML([]byte("x = " + text))
	if err != nil {
		return nil
	}
	return one["x"]
}

// missing refuses a document without a key that has no default. A recipe made in code may lack
// model and data.
func (p *reader) missing(k *row) {
	inCode := k.Name == "model" || k.Name == "data.sources"
	if k.Default != "" || p.saved && inCode {
		return
	}
	p.lacks(k)
}

// lacks refuses a document without a key.
func (p *reader) lacks(k *row) {
	fix := fmt.Sprintf("add %s = %s", k.short(), k.sample)
	if s := k.section(); s != "" {
		fix += fmt.Sprintf(" below [%s]", s)
	}
	p.errs = append(p.errs, found{len(p.lines) + 1,
		diag.New(diag.RecipeKey, "%s is not given", k.Name).At("%s", p.path).Try("%s", fix)})
}

// check refuses values that contradict each other. It runs only over values that are sound by
// themselves, or one mistake would be reported twice.
func (p *reader) check() {
	if len(p.errs) > 0 {
		return
	}
	r, o, g := p.r, p.r.Optimizer, p.r.Guard
	refuse := func(bad bool, key, fix, format string, args ...any) {
		if bad {
			p.fail(diag.RecipeValue, key, fmt.Sprintf(format, args...), fix)
		}
	}
	refuse(r.Batch%r.Microbatch != 0, "microbatch",
		fmt.Sprintf("set microbatch to %d", divisor(r.Batch, r.Microbatch)),
		"microbatch = %d does not divide batch = %d", r.Microbatch, r.Batch)
	refuse(o.Warmup > r.Steps && r.Steps > 0, "optimizer.warmup",
		fmt.Sprintf("set warmup to %d, or steps to more", r.Steps/10),
		"warmup = %d is more than steps = %d", o.Warmup, r.Steps)
	refuse(o.Schedule == "constant" && o.MinLR != o.LR, "optimizer.lr",
		fmt.Sprintf("set lr to %s, or schedule to \"cosine\"", float(o.LR)),
		"a constant learning rate cannot go from %s to %s", float(o.LR), float(o.MinLR))
	refuse(g.Spike != 0 && g.Spike <= 1, "guard.spike", "give it 2 or more, or 0",
		"guard.spike: %s would reject every second step", float(g.Spike))
	refuse(g.Stall != 0 && g.Stall < 2, "guard.stall", "give it 5 or more, or 0",
		"guard.stall: %s would call an ordinary step a stall", float(g.Stall))
	p.checkSources()
}

// checkSources refuses a mixture in which only some sources have a weight, and chats with two
// templates.
func (p *reader) checkSources() {
	var weights int
	var template string
	list := p.r.Data.Sources
	for i, s := range list {
		if p.item = i; s.Path == Stdin && (len(list) > 1 || !s.bare()) {
			p.fail(diag.RecipeValue, p.exact("data.sources"), "data.sources: standard input is not a"+
				" part of a mixture, and has neither name, weight, format nor template", `write ["-"]`)
		} else if s.Path == Stdin && p.r.Epochs > 0 {
			p.fail(diag.RecipeValue, "epochs", "epochs: standard input has no length", "give steps")
		} else if s.Path == Stdin && p.r.Eval.Share > 0 {
			p.fail(diag.RecipeValue, "eval.data", "eval.data: nothing can be held out of standard input",
				`give a path: eval.data = "PATH"`)
		}
	}
	for i, s := range list {
		p.item = i
		if s.Weight != 0 {
			weights++
		}
		if s.Template != "" && template != "" && s.Template != template {
			p.part = "template"
			p.fail(diag.RecipeValue, p.exact("data.sources"),
				fmt.Sprintf("data.sources: chats have two templates, %q and %q", template, s.Template),
				"give all sources the same template")
		}
		template = cmp.Or(s.Template, template)
	}
	if weights != 0 && weights != len(list) {
		p.item = slices.IndexFunc(list, func(s Source) bool { return s.Weight == 0 })
		p.part = "path"
		p.fail(diag.RecipeValue, p.exact("data.sources"),
			fmt.Sprintf("data.sources: %d of %d sources have a weight", weights, len(list)),
			"give every source a weight, or none to count them by their size")
	}
}

// divisor is the largest number up to n that divides whole.
func divisor(whole, n int) int {
	best := 1
	for d := 1; d*d <= whole; d++ {
		for _, d := range []int{d, whole / d} {
			if whole%d == 0 && d <= n {
				best = max(best, d)
			}
		}
	}
	return best
}
