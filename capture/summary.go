package capture

import (
	"cmp"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A Summary is a model as a person wants to see it.
type Summary struct {
	Name   string `json:"name"`
	Family string `json:"family"`
	Note   string `json:"note,omitempty"`

	Parameters int64 `json:"parameters"`
	Active     int64 `json:"active"` // without the experts that a token does not see

	Layers  int64 `json:"layers"`
	Hidden  int64 `json:"hidden"`
	MLP     int64 `json:"mlp"`
	Vocab   int64 `json:"vocabulary"`
	Context int64 `json:"context"`
	Heads   int64 `json:"heads"`
	KVHeads int64 `json:"key_heads"`
	HeadDim int64 `json:"head_size"`
	// Window is how many keys a query sees in Windowed of the layers; 0 where all see everything.
	Window   int64 `json:"window,omitempty"`
	Windowed int64 `json:"windowed_layers,omitempty"`
	Tied     bool  `json:"tied"`

	Blocks []Block `json:"blocks"`

	// Seq is the length of the sequences that work is counted for, the mean over their tokens.
	Seq int64 `json:"sequence"`
	// Forward and Training are operations for one token, under the masks of attention; without what
	// is computed a second time to save memory.
	Forward  float64 `json:"forward_flops"`
	Training float64 `json:"training_flops"`
	// Attention is the share of scores and weighted values in that; the rest is linear layers.
	Attention float64 `json:"attention_share"`
	Memory    Memory  `json:"memory"`

	// Files is what the checkpoint holds; nil for a configuration alone.
	Files     *Contents `json:"checkpoint,omitempty"`
	Tokenizer string    `json:"tokenizer,omitempty"` // the file's name within the folder

	config *model.Config // nil for a program
}

// A Block is all parameters of one kind.
type Block struct {
	Tag        string  `json:"tag"`
	Tensors    int64   `json:"tensors,omitempty"`
	Parameters int64   `json:"parameters"`
	Share      float64 `json:"share"` // of all parameters
}

// Memory is the bytes of a model in training, on all devices together and without activations:
// weights in bf16 to compute with, gradients added up in f32, the f32 weights that are updated, and
// AdamW's two moments in f32. Sixteen to eighteen bytes a parameter are usual.
type Memory struct {
	Weights   int64 `json:"weights_bf16"`
	Gradients int64 `json:"gradients_f32"`
	Master    int64 `json:"master_f32"`
	Moments   int64 `json:"moments_f32"`
}

// Sum is all of it.
func (m Memory) Sum() int64 { return m.Weights + m.Gradients + m.Master + m.Moments }

// defaultSeq is the length of sequences that most published figures of training are for.
const defaultSeq = 8192

// Summary counts a model; seq is the length of sequences, 0 for 8,192 or the context if that is
// shorter.
func (m *Model) Summary(seq int64) *Summary {
	if m.Program != nil {
		return m.Program.summary(m.Name, seq, m.Contents())
	}
	c := m.Config
	seq = cmp.Or(seq, min(defaultSeq, c.Context))
	n := c.Count()
	s := &Summary{Name: m.Name, Family: c.Arch, Note: m.Note, Parameters: n.Total, Active: n.Active,
		Layers: c.Layers, Hidden: c.Hidden, MLP: c.MLP, Vocab: c.Vocab, Context: c.Context,
		Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Tied: c.Tied,
		Blocks: blocks(c.Params(), n), Seq: seq, Files: m.Contents(), Memory: memoryOf(n.Total),
		config: c}
	f := c.Forward(seq)
	s.Forward, s.Training, s.Attention = f.Sum(), f.Training().Sum(), f.Attention/f.Sum()
	for _, w := range c.Windowed {
		if w {
			s.Window, s.Windowed = c.Window, s.Windowed+1
		}
	}
	if m.Tokenizer != "" {
		s.Tokenizer = filepath.Base(m.Tokenizer)
	}
	return s
}

// summary is Summary for a program. Its sizes are what its parameters show.
func (p *Program) summary(name string, seq int64, files *Contents) *Summary {
	f, n := p.Facts(), p.count()
	seq = cmp.Or(seq, min(defaultSeq, f.Context))
	work := p.Forward(seq)
	s := &Summary{Name: name, Family: p.family(), Parameters: n.Total, Active: n.Active,
		Layers: f.Layers, Hidden: f.Hidden, MLP: f.MLP, Vocab: f.Vocab, Context: f.Context,
		Heads: f.Heads, KVHeads: f.KVHeads, HeadDim: f.HeadDim, Blocks: blocks(p.Params(), n),
		Seq: seq, Forward: work.Sum(), Training: work.Training().Sum(), Files: files,
		Memory: memoryOf(n.Total)}
	if sum := work.Sum(); sum > 0 {
		s.Attention = work.Attention / sum
	}
	for _, group := range p.archive.Tied() {
		if tag := tagIn(p.Params(), group); tag == ir.Embed || tag == ir.Head {
			s.Tied = true
		}
	}
	return s
}

// tagIn is the tag of the parameter that some names are tied to.
func tagIn(params []model.Param, names []string) ir.Tag {
	for _, p := range params {
		if slices.Contains(names, p.Source) {
			return p.Tag
		}
	}
	return ""
}

// memoryOf is the memory of n parameters.
func memoryOf(n int64) Memory {
	return Memory{Weights: 2 * n, Gradients: 4 * n, Master: 4 * n, Moments: 8 * n}
}

// blocks adds up parameters by their tag, in the order in which data passes them. Of a model with
// experts only tables and layers are distinguished.
func blocks(params []model.Param, n model.Count) []Block {
	var list []Block
	add := func(tag string, tensors, size int64) {
		i := slices.IndexFunc(list, func(b Block) bool { return b.Tag == tag })
		if i < 0 {
			list, i = append(list, Block{Tag: tag}), len(list)
		}
		list[i].Tensors += tensors
		list[i].Parameters += size
		list[i].Share = float64(list[i].Parameters) / float64(n.Total)
	}
	// A tensor that holds several parameters, such as a fused QKV, counts once.
	seen := map[string]bool{}
	for _, p := range params {
		tensors, size := int64(0), p.Size()
		if p.Buffer {
			size = 0 // it is not learned
		}
		for _, name := range p.Tensors() {
			if !seen[name] {
				tensors++
			}
			seen[name] = true
		}
		add(string(p.Tag), tensors, size)
	}
	return list
}
