package capture

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture/aten"
	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

// ProgramName is the name, in the folder of a run, of the archive that its model was captured from.
const ProgramName = "program.pt2"

// A Program is a model that torch.export saved: it is what the archive computes, and begins with
// the archive's weights. It implements [model.Model].
type Program struct {
	*aten.Model
	Digest string // of the program and its tensors, whatever the file is called

	path    string
	archive *pt2.Archive
}

// openProgram reads an archive of torch.export.save.
func openProgram(path string) (*Model, error) {
	p, err := OpenProgram(path)
	if err != nil {
		return nil, err
	}
	m := &Model{Name: strings.TrimSuffix(filepath.Base(path), filepath.Ext(path)), Program: p}
	if m.Config, err = p.likeness(); err != nil {
		m.unlike = diag.From(err).What
	}
	for _, t := range p.archive.Tensors() {
		if t.Meta && t.Param {
			m.lack = diag.New(diag.ModelMissing, "the archive holds no weights").At("%s", path).
				Because("the module was exported from the meta device").
				Try("load the weights into the module, and export it again")
		}
	}
	return m, nil
}

// OpenProgram reads the program of an archive of torch.export.save. What is not supported is
// listed in one error.
func OpenProgram(path string) (*Program, error) {
	a, err := pt2.Open(path)
	if err != nil {
		return nil, err
	}
	p := &Program{path: path, archive: a, Digest: a.Digest()}
	if p.Model, err = aten.New(a); err != nil {
		_ = a.Close()
		e := diag.From(err)
		if e.Where == "" {
			e = e.At("%s", path)
		}
		return nil, e
	}
	return p, nil
}

// Close ends the use of the file.
func (p *Program) Close() error { return p.archive.Close() }

// described is what a checkpoint says of the program that it belongs to.
type described struct {
	Type    string `json:"model_type"` // [model.Captured]
	Program string `json:"program"`
	Digest  string `json:"digest"`
	Torch   string `json:"torch"` // the release that exported it
}

// Write says which program this is; a checkpoint keeps it in the place of config.json.
func (p *Program) Write() ([]byte, error) {
	return json.Marshal(described{model.Captured, ProgramName, p.Digest, p.archive.Program.Torch})
}

// ProgramOf opens the program of a checkpoint in the folder of its run; text is what
// [Program.Write] wrote. It is nil for a checkpoint of a configuration.
func ProgramOf(text []byte, run string) (*Program, error) {
	var d described
	if json.Unmarshal(text, &d) != nil || d.Type != model.Captured {
		return nil, nil
	}
	path := filepath.Join(run, ProgramName)
	if _, err := os.Stat(path); err != nil {
		return nil, diag.New(diag.ModelMissing, "the program of the checkpoint is not there").
			At("%s", path).Because("the run's folder keeps the archive that its model was captured from").
			Try("put the archive there, under that name")
	}
	p, err := OpenProgram(path)
	if err != nil {
		return nil, err
	}
	if p.Digest != d.Digest {
		_ = p.Close()
		return nil, diag.New(diag.RecipeChanged, "the program is not the one that was trained").
			At("%s", path).Because("its digest was %.12s, now it is %.12s", d.Digest, p.Digest).
			Try("put the archive there that the run began with")
	}
	return p, nil
}

// Began returns an error if the run in a folder began with another program.
func (p *Program) Began(run string) error {
	kept, err := pt2.Open(filepath.Join(run, ProgramName))
	if err != nil {
		return nil //nolint:nilerr // the checkpoint says which program it is of
	}
	defer func() { _ = kept.Close() }()
	if kept.Digest() == p.Digest {
		return nil
	}
	return diag.New(diag.RecipeChanged, "%s is not the program that the run began with", p.path).
		Because("its digest was %.12s, now it is %.12s", kept.Digest(), p.Digest).
		Try("restore the file, or remove it: %s has a copy; or give the new run another folder: "+
			"--set out=NAME", run)
}

// keep copies the archive into the folder of a run, from which the run is resumed and exported
// whatever becomes of the file.
func (p *Program) keep(run string) error {
	to := filepath.Join(run, ProgramName)
	if have, err := pt2.Open(to); err == nil {
		same := have.Digest() == p.Digest
		_ = have.Close()
		if same {
			return nil
		}
	}
	f, _, err := safedir.Peek(p.path, os.OpenFile)
	if err != nil {
		return diag.New(diag.FileError, "cannot read the program").At("%s", p.path).Wrap(err)
	}
	defer f.Close() //nolint:errcheck // read only
	err = atomicfile.WriteFunc(to, 0o666, func(w io.Writer) error {
		_, err := io.Copy(w, f)
		return err
	})
	if err != nil {
		return diag.New(diag.FileError, "cannot keep the program in the run's folder").At("%s", to).
			Wrap(err)
	}
	return nil
}

// Forward gives the work of one token of a sequence, the mean over its places. Every query counts
// as seeing the keys before it: windows are not known.
func (p *Program) Forward(seq int64) model.Flops {
	f := p.Facts()
	weights := lists.Sum(f.Linears(p.Params()), func(l model.Linear) float64 {
		return float64(l.In*l.Out*l.Times) * float64(max(1, len(l.Layers)))
	})
	perKey := 4 * float64(f.Heads*f.HeadDim) * float64(f.Layers)
	return model.Flops{Linear: 2 * weights, Square: perKey * float64(seq),
		Attention: perKey * ir.MeanKeys(float64(seq), float64(seq))}
}

// count adds up parameters.
func (p *Program) count() (n model.Count) {
	f := p.Facts()
	for _, one := range p.Params() {
		if one.Buffer {
			continue
		}
		size := one.Size()
		n.Total += size
		if one.Tag == ir.Experts && f.MoE != nil {
			size = size / f.MoE.Experts * f.MoE.TopK
		}
		n.Active += size
	}
	return n
}

// likeness is the decoder of the program's sizes, by which plans are searched and priced: its cost
// is nearly the program's, and its names are not. The error says why there is no such decoder.
func (p *Program) likeness() (*model.Config, error) {
	f := p.Facts()
	c := &model.Config{Arch: "llama", Vocab: f.Vocab, Hidden: f.Hidden, Layers: f.Layers,
		Heads: f.Heads, KVHeads: f.KVHeads, HeadDim: f.HeadDim, MLP: f.MLP,
		Context: min(f.Context, 1<<20), Window: f.Window, AttnCap: f.AttnCap, Gated: f.Gated,
		Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU, Rotary: f.HeadDim &^ 1,
		Rope: ir.Rope{Theta: 1e4}, AttnScale: 1 / math.Sqrt(float64(max(1, f.HeadDim))), BOS: -1,
		Tied: !slices.ContainsFunc(p.Params(), func(q model.Param) bool { return q.Tag == ir.Head }),
		MoE:  f.MoE, MLA: f.MLA}
	if c.MoE != nil {
		moe := *c.MoE // what a score is costs nothing
		moe.Score, moe.Scale = cmp.Or(moe.Score, "softmax"), cmp.Or(moe.Scale, 1)
		c.Arch, c.MoE = "mixtral", &moe
	}
	if c.MLA != nil && c.MLA.KVRank == 0 {
		c.MLA = nil // attention whose ranks are not seen is priced as if it had none
	}
	if c.MLP == 0 && c.MoE != nil {
		c.MLP = c.MoE.MLP
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	return c, nil
}

// contents lists what the archive holds.
func (p *Program) contents() *Contents {
	c := &Contents{Files: 1, Types: map[string]int{}}
	if info, err := os.Stat(p.path); err == nil {
		c.Bytes = info.Size()
	}
	for _, t := range p.archive.Tensors() {
		c.Tensors++
		c.Types[t.Type.String()]++
	}
	return c
}

// read fills dst with a parameter.
func (p *Program) read(one *model.Param, dst []float32) error {
	if err := p.Init(one, 0, dst); err != nil {
		return err
	}
	if bad := notFinite32(dst); bad > 0 {
		return diag.New(diag.WeightNotFinite, "%d numbers of %s are not finite", bad, one.Source).
			At("%s", p.path).Try("export the module with other weights")
	}
	return nil
}

func notFinite32(list []float32) (n int64) {
	for _, v := range list {
		if v-v != 0 {
			n++
		}
	}
	return n
}

// notFinite lists the parameters' tensors that hold such numbers.
func (p *Program) notFinite() (bad []Damaged, err error) {
	for _, one := range p.Params() {
		for _, name := range one.Tensors() {
			t, err := p.archive.Tensor(name)
			if err != nil {
				return nil, err
			}
			buf := make([]float32, t.Shape().Elements())
			if err := t.Read(buf); err != nil {
				return nil, err
			}
			if n := notFinite32(buf); n > 0 {
				bad = append(bad, Damaged{name, n})
			}
		}
	}
	return bad, nil
}

// Parameters counts what is learned.
func (p *Program) Parameters() int64 { return p.count().Total }

// Type is the element type of the parameters.
func (p *Program) Type() dtype.DType {
	for _, one := range p.Params() {
		if t, err := p.archive.Tensor(one.Tensors()[0]); err == nil && !one.Buffer {
			return t.Type
		}
	}
	return dtype.F32
}

// Export writes parameters and persistent buffers under the names of the module's state_dict, so
// that module.load_state_dict takes them with strict=True: tied parameters stand under each of
// their names. Buffers, and parameters that the loss does not depend on, are the archive's. The
// folder must be new or empty.
func (p *Program) Export(dir string, o ExportOptions, read Reader) ([]safetensors.File, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if err := vacate(dir); err != nil {
		return nil, err
	}
	list, err := p.items(o.Type, read)
	if err != nil {
		return nil, err
	}
	files, err := safetensors.WriteFolder(dir, list, safetensors.Options{MaxBytes: o.MaxBytes,
		Metadata: map[string]string{"format": "pt"}})
	if err == nil && o.Files != "" {
		err = Accompany(dir, o.Files)
	}
	return files, err
}

// items lists the tensors of the state_dict in the order of the program's inputs.
func (p *Program) items(t dtype.DType, read Reader) ([]safetensors.Item, error) {
	trained := map[string]safetensors.Item{}
	for _, item := range items(p.Params(), t, read) {
		trained[item.Name] = item
	}
	sole := map[string]string{}
	for _, group := range p.archive.Tied() {
		for _, name := range group {
			sole[name] = group[0]
		}
	}
	var list []safetensors.Item
	for _, in := range p.archive.Program.Inputs {
		if in.Kind != pt2.Parameter && (in.Kind != pt2.Buffer || !in.Persistent) {
			continue
		}
		stored, err := p.archive.Tensor(in.Name)
		if err != nil {
			return nil, err
		}
		name := in.Name
		if first, tied := sole[name]; tied {
			name = first
		}
		item, ok := trained[name]
		if ok {
			item.Shape.Dims = stored.Dims
		} else {
			item = p.untrained(stored)
		}
		item.Name = in.Name
		list = append(list, item)
	}
	if len(list) == 0 {
		return nil, diag.New(diag.BadInput, "the program has no parameters").At("%s", p.path)
	}
	return list, nil
}

// untrained is a tensor as the archive has it.
func (p *Program) untrained(t *pt2.Tensor) safetensors.Item {
	return safetensors.Item{Shape: t.Shape(), Data: func(w io.Writer) error {
		b, err := t.Bytes()
		if err == nil {
			_, err = w.Write(b)
		}
		return err
	}}
}

// family is what the program is called in a summary.
func (p *Program) family() string {
	return fmt.Sprintf("torch.export of torch %s", p.archive.Program.Torch)
}
