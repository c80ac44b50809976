package abtest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// What all sides train with: AdamW's settings, and a rate that stays.
const (
	Beta1 = 0.9
	Beta2 = 0.95
	Eps   = 1e-8
	Decay = 0.1
	Clip  = 1
	Rate  = 3e-4
)

// Config is the model of a size: root mean square norms, learned positions, a tied head.
func Config(s Size) *model.Config {
	return &model.Config{Arch: "gpt2", Vocab: s.Vocab, Hidden: s.Hidden, Layers: s.Layers,
		Heads: s.Heads, KVHeads: s.Heads, HeadDim: s.Hidden / s.Heads, MLP: 4 * s.Hidden,
		Context: s.Seq, Norm: model.Norm{Eps: 1e-5}, Activation: model.GELU, Learned: true,
		AttnScale: 1 / math.Sqrt(float64(s.Hidden/s.Heads)), Tied: true}
}

// Weights are what everyone begins from. Matrices are [in, out].
type Weights struct {
	IDs, Labels []int32
	at          map[string][]float32 // by the name that a layer of our model has
	file        string               // the same for Python: in order, then the tokens
}

// NewWeights draws weights and tokens and writes them to a file, which Remove removes.
func NewWeights(s Size) (*Weights, error) {
	w := &Weights{at: map[string][]float32{}}
	r := rand.New(rand.NewPCG(1, uint64(s.Hidden)))
	var file []byte
	add := func(name string, n int64, scale float64) {
		list := make([]float32, n)
		for i := range list {
			if list[i] = 1; scale > 0 {
				list[i] = float32(scale * r.NormFloat64())
			}
			file = binary.LittleEndian.AppendUint32(file, math.Float32bits(list[i]))
		}
		w.at[name] = list
	}
	d, deep := s.Hidden, 0.02/math.Sqrt(2*float64(s.Layers)) // as GPT-2 begins
	add("embed", s.Vocab*d, 0.02)
	add("position", s.Seq*d, 0.02)
	for i := range s.Layers {
		for _, p := range []struct {
			name  string
			n     int64
			scale float64
		}{
			{"norm1", d, 0}, {"q", d * d, 0.02}, {"k", d * d, 0.02}, {"v", d * d, 0.02},
			{"o", d * d, deep}, {"norm2", d, 0}, {"up", 4 * d * d, 0.02}, {"down", 4 * d * d, deep},
		} {
			add(fmt.Sprintf("%s.%d", p.name, i), p.n, p.scale)
		}
	}
	add("norm", d, 0)
	for _, list := range []*[]int32{&w.IDs, &w.Labels} {
		for range s.Batch * s.Seq {
			n := int32(r.Int64N(s.Vocab))
			*list = append(*list, n)
			file = binary.LittleEndian.AppendUint32(file, uint32(n))
		}
	}
	f, err := os.CreateTemp("", "deepwell-turns-*.bin")
	if err != nil {
		return nil, err
	}
	w.file = f.Name()
	_, err = f.Write(file)
	return w, errors.Join(err, f.Close())
}

// Remove removes the file.
func (w *Weights) Remove() { _ = os.Remove(w.file) }

// Param gives the first values of a parameter of our model, of one layer or of a stack of them, as
// the model lays it out.
func (w *Weights) Param(name string, dims []ir.Dim) ([]float32, bool) {
	name = strings.TrimPrefix(name, "block.")
	if len(dims) == 0 || dims[0].Name != ir.Layer {
		value, ok := w.at[name]
		if ok && strings.HasPrefix(name, "down.") { // it is [out, in] here
			value = transposed(value, int(dims[1].Size), int(dims[0].Size))
		}
		return value, ok
	}
	var all []float32
	for i := range dims[0].Size {
		value, ok := w.Param(fmt.Sprintf("%s.%d", name, i), dims[1:])
		if !ok {
			return nil, false
		}
		all = append(all, value...)
	}
	return all, true
}

func transposed(list []float32, rows, cols int) []float32 {
	out := make([]float32, len(list))
	for r := range rows {
		for c := range cols {
			out[c*rows+r] = list[r*cols+c]
		}
	}
	return out
}
