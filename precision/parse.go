package precision

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// Parse reads a policy. path is the file's name for error messages. Parse does not check the
// policy against a model: see [Policy.Check].
func Parse(data []byte, path string) (*Policy, error) {
	r := reader{strictjson.New(format, data, path)}
	p := r.policy()
	if err := r.End(); err != nil {
		return nil, err
	}
	return p, nil
}

var format = strictjson.Format{Name: "policy", Text: diag.PolicyText, Key: diag.PolicyKey,
	Value: diag.PolicyValue}

type (
	reader struct{ *strictjson.Reader }
	field  = strictjson.Field
)

// whole is the To of a rule for all layers, until the number of layers is known.
const whole = -1

func (r reader) policy() *Policy {
	p, version := &Policy{}, 0
	r.Object(
		field{Name: "version", Must: true, Read: func() {
			version = r.count()
			if r.OK() && version != Version {
				r.Fail(diag.PolicyVersion, "the policy has version %d; this binary reads %d", version,
					Version)
			}
		}},
		field{Name: "layers", Must: true, Read: func() { p.Layers = r.count() }},
		field{Name: "payload", Read: func() {
			p.Payload = dtype.Format(r.Word([]string{string(dtype.FormatBF16)}))
		}},
		field{Name: "rules", Must: true, Read: func() {
			r.List("a list of rules", func(i int) {
				outer := r.Key
				r.Key = fmt.Sprintf("%s.%d", outer, i+1)
				p.Rules = append(p.Rules, r.rule())
				r.Key = outer
			})
		}},
	)
	for i := range p.Rules {
		rule := &p.Rules[i]
		if rule.To == whole {
			rule.To = p.Layers
		}
		if rule.To > p.Layers && r.OK() {
			r.Key = fmt.Sprintf("rules.%d.layers", i+1)
			r.Fail(diag.PolicyValue, "layer %d is not one of %d", rule.To-1, p.Layers)
			r.Fix("the layers are 0-%d", p.Layers-1)
		}
	}
	return p
}

func (r reader) rule() (rule Rule) {
	r.Object(
		field{Name: "linears", Must: true, Read: func() {
			rule.Linears = r.words("a list of linear layers or parts of a block", nil)
			lists.Sort(rule.Linears, compareWords)
		}},
		field{Name: "layers", Must: true, Read: func() { rule.From, rule.To = r.span() }},
		field{Name: "products", Read: func() {
			rule.GEMMs = r.words("", gemms)
			lists.Sort(rule.GEMMs, func(a, b string) int {
				return cmp.Compare(slices.Index(gemms, a), slices.Index(gemms, b))
			})
			if len(rule.GEMMs) == len(gemms) {
				rule.GEMMs = nil
			}
		}},
		field{Name: "format", Must: true, Read: func() { rule.Format = dtype.Format(r.Word(names())) }},
		field{Name: "fallen", Read: func() {
			rule.Fallen = r.Flag()
		}},
		field{Name: "why", Must: true, Read: func() {
			rule.Why = r.Text()
			if r.OK() && strings.TrimSpace(rule.Why) == "" {
				r.Fail(diag.PolicyValue, "a rule has no reason")
				r.Fix("say in a sentence why it is there")
			}
		}},
	)
	return rule
}

// maxLayers bounds what is read; [model.Config] has the same limit.
const maxLayers = 1 << 12

func (r reader) count() int { return int(r.Whole(1, maxLayers, "")) }

// words reads a list of distinct words, at least one.
func (r reader) words(want string, known []string) []string {
	list := r.Words(want, known)
	if len(list) == 0 {
		r.Fail(diag.PolicyValue, "%s names nothing", r.Key)
	}
	return list
}

// span reads layers: "all", "3" or "0-27", the last one included.
func (r reader) span() (from, to int) {
	s := r.Text()
	if s == "all" {
		return 0, whole
	}
	first, second, two := strings.Cut(s, "-")
	if !two {
		second = first
	}
	from, err1 := layerNumber(first)
	to, err2 := layerNumber(second)
	if err1 != nil || err2 != nil || from > to {
		r.Fail(diag.PolicyValue, "%s is %q, not layers", r.Key, s)
		r.Fix(`write "all", one layer as "3", or the first and the last as "0-27"`)
	}
	return from, to + 1
}

// layerNumber reads a number in its canonical spelling.
func layerNumber(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err == nil && (n < 0 || n >= maxLayers || strconv.Itoa(n) != s) {
		err = strconv.ErrRange
	}
	return n, err
}
