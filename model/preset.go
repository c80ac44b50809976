package model

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/internal/strictjson"
)

// A Preset is a known model.
type Preset struct {
	Name string
	// Aliases are other names that people type, and its name on the Hugging Face Hub.
	Aliases []string
	// Config is nil where the sizes of the model are not public.
	Config *Config
	// Total and Active are the published numbers of parameters of a model without a Config; 0 where
	// those are not known either.
	Total, Active float64
	Note          string // what a person should know
}

// Presets lists the known models by family.
func Presets() []Preset {
	list := slices.Clone(presets())
	for i, p := range list {
		if p.Config != nil {
			own := *p.Config // which the caller may change
			list[i].Config = &own
		}
	}
	return list
}

// presets reads presets.json once. It is part of the binary, and tests read every model of it.
var presets = sync.OnceValue(func() (list []Preset) {
	var families []family
	if err := strictjson.Decode(presetsText, &families); err != nil {
		panic(err)
	}
	for _, f := range families {
		for _, m := range f.Models {
			p := Preset{Name: m.Name, Aliases: m.Aliases, Total: m.Total, Active: m.Active, Note: m.Note}
			if m.Sizes != nil {
				p.Config = m.config(f.Config)
			}
			list = append(list, p)
		}
	}
	return list
})

//go:embed presets.json
var presetsText []byte

// A family is models of presets.json that have much in common.
type family struct {
	Source string          // where the numbers are from
	Config json.RawMessage // what all have, a spec
	Models []struct {
		modelRow
		Total, Active float64
		Note          string
	}
}

// A modelRow is a model of a family.
type modelRow struct {
	Name    string
	Aliases []string
	Sizes   []int64         // layers, hidden, MLP, heads, key heads
	Config  json.RawMessage // what it has else, a spec
}

// A spec is a Config without what follows from the rest of it.
type spec struct {
	Config
	Whole   int64   // every Whole-th layer has full attention, the others a window; 0: all have one
	Partial float64 // the part of a head that turns with position; 0 is all
	Scalar  float64 // AttnScale is one over its root; 0 is HeadDim
}

// config puts a model together.
func (m modelRow) config(shared json.RawMessage) *Config {
	n := m.Sizes
	s := spec{Config: Config{Layers: n[0], Hidden: n[1], MLP: n[2], Heads: n[3], KVHeads: n[4],
		BOS: -1}}
	for _, text := range []json.RawMessage{shared, m.Config} {
		if len(text) == 0 {
			continue
		}
		if err := strictjson.Decode(text, &s); err != nil {
			panic(m.Name + ": " + err.Error())
		}
	}
	c := &s.Config
	c.HeadDim = cmp.Or(c.HeadDim, c.Hidden/c.Heads)
	c.AttnScale = 1 / math.Sqrt(cmp.Or(s.Scalar, float64(c.HeadDim)))
	if c.Activation == "" {
		c.Activation, c.Gated = SiLU, true
	}
	if !c.Learned {
		c.LocalRope = cmp.Or(c.LocalRope, c.Rope)
		c.Rotary = int64(float64(c.HeadDim) * cmp.Or(s.Partial, 1))
	}
	if a := c.MLA; a != nil {
		c.Rotary = a.Rope
		if a.MScale != 0 {
			m := mscale(c.Rope.Factor, a.MScale)
			c.AttnScale *= m * m
		}
	}
	if c.MoE != nil {
		c.MoE.Score, c.MoE.Scale = cmp.Or(c.MoE.Score, softmax), cmp.Or(c.MoE.Scale, 1)
	}
	if c.Window > 0 {
		c.Windowed = make([]bool, c.Layers)
		for i := range c.Layers {
			c.Windowed[i] = s.Whole == 0 || (i+1)%s.Whole != 0
		}
	}
	return c
}

// Find gives a preset by name or alias. Case, and the signs between words, do not matter, and a
// name from the Hugging Face Hub goes with or without its organization.
func Find(name string) (*Preset, error) {
	want := plain(name)
	var names []string
	for _, p := range Presets() {
		names = append(names, p.Name)
		for _, n := range append([]string{p.Name}, p.Aliases...) {
			if plain(n) == want {
				return &p, nil
			}
		}
	}
	return nil, bad("no preset is called %q", name).
		Meant(strings.ToLower(name), names, "did you mean %s?", "deepwell models")
}

// plain is a name without what people write differently.
func plain(name string) string {
	name = strings.ToLower(name)
	if i := strings.LastIndex(name, "/"); i >= 0 {
		name = name[i+1:]
	}
	return strings.NewReplacer("-", "", "_", "", " ", "").Replace(name)
}
