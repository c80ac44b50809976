package capture

import (
	"cmp"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

// ExportOptions say how a model is written.
type ExportOptions struct {
	// Type is the element type of the weights: F32, which is also the zero value, BF16 or F16.
	// Elements are rounded to the nearest, ties to even; one that F16 cannot hold is an error.
	Type dtype.DType
	// MaxBytes bounds the weights of one file; 0 means 5 GB, as transformers had it for years.
	MaxBytes int64
	// Files is the folder that the tokenizer and generation_config.json are copied from; ""
	// copies nothing.
	Files string
	// Config is the config.json that the model came with; nil without one. What it says is
	// kept where it says the same model.
	Config []byte
}

// A Reader fills dst with a parameter. [Model.Read] is one, and so is what reads a checkpoint.
type Reader func(p *model.Param, dst []float32) error

// Export writes a model as a folder that transformers loads. The folder must be new or empty; its
// config.json comes last, so that a folder that has one is whole. Parameters are asked for one at a
// time, layer by layer ([model.Param.Layers]), in the order of tensors in the files.
func Export(dir string, c *model.Config, o ExportOptions, read Reader) ([]safetensors.File, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	config, err := configOf(c, o.Config, o.Type)
	if err != nil {
		return nil, err
	}
	if err := vacate(dir); err != nil {
		return nil, err
	}
	files, err := safetensors.WriteFolder(dir, items(c.Params(), o.Type, read), safetensors.Options{
		MaxBytes: o.MaxBytes, Metadata: map[string]string{"format": "pt"}})
	if err != nil {
		return nil, err
	}
	if o.Files != "" {
		if err := Accompany(dir, o.Files); err != nil {
			return nil, err
		}
	}
	path := filepath.Join(dir, configName)
	if err := atomicfile.Write(path, config, 0o644); err != nil {
		return nil, diag.New(diag.FileError, "cannot write %s", path).Wrap(err)
	}
	return files, nil
}

// complete fills in defaults.
func (o *ExportOptions) complete() error {
	o.Type, o.MaxBytes = cmp.Or(o.Type, dtype.F32), cmp.Or(o.MaxBytes, 5e9)
	if !slices.Contains([]dtype.DType{dtype.F32, dtype.BF16, dtype.F16}, o.Type) {
		return diag.New(diag.WeightType, "weights are not written as %s", o.Type).
			Try("f32, bf16 or f16")
	}
	return nil
}

// vacate makes a folder, and refuses one that holds anything.
func vacate(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return diag.New(diag.FileError, "cannot make the folder %s", dir).Wrap(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	if len(entries) > 0 {
		return diag.New(diag.BadUsage, "the folder holds %s already", entries[0].Name()).
			At("%s", dir).Try("name a new folder")
	}
	return nil
}

// items lists the tensors of parameters, each with the parameters that stand in it.
func items(params []model.Param, t dtype.DType, read Reader) []safetensors.Item {
	parts := map[string][]part{}
	var names []string
	for _, p := range params {
		for _, one := range p.Layers() {
			for i, name := range one.Tensors() {
				if parts[name] == nil {
					names = append(names, name)
				}
				parts[name] = append(parts[name], part{&one, i})
			}
		}
	}
	held := &held{read: read}
	list := make([]safetensors.Item, len(names))
	for i, name := range names {
		parts := parts[name]
		shape := dtype.Shape{Type: t, Dims: parts[0].param.Shape}
		list[i] = safetensors.Item{Name: name, Shape: shape, Data: func(w io.Writer) error {
			tensor, err := held.tensor(parts, shape.Elements())
			if err != nil {
				return err
			}
			return write(w, t, name, tensor)
		}}
	}
	return list
}

// A part is what a parameter has in one of its tensors, the t-th.
type part struct {
	param *model.Param
	t     int
}

// held keeps the parameter that was read last: each expert of a layer may have a tensor of its own,
// and they are written one after the other.
type held struct {
	read Reader
	name string
	data []float32
}

// tensor puts together one tensor.
func (h *held) tensor(parts []part, elements int64) ([]float32, error) {
	tensor := make([]float32, elements)
	for _, p := range parts {
		if p.param.Size() == elements && !p.param.Transposed { // it is the tensor as it stands
			return tensor, h.read(p.param, tensor)
		}
		if h.name != p.param.Name {
			h.name, h.data = "", make([]float32, p.param.Size())
			if err := h.read(p.param, h.data); err != nil {
				return nil, err
			}
			h.name = p.param.Name
		}
		if err := model.Put(p.param, p.t, tensor, h.data); err != nil {
			return nil, err
		}
	}
	return tensor, nil
}

// write writes the elements of a tensor.
func write(w io.Writer, t dtype.DType, name string, tensor []float32) error {
	const window = 256 << 10 // elements; a megabyte in f32
	buf := make([]byte, t.Bytes(min(window, int64(len(tensor)))))
	for at := 0; at < len(tensor); at += window {
		some := tensor[at:min(at+window, len(tensor))]
		bytes := buf[:t.Bytes(int64(len(some)))]
		if over := t.Encode(bytes, some); over >= 0 {
			return diag.New(diag.WeightType, "element %d of %s is %v, more than %s can hold",
				at+over, name, some[over], t).Try("write it as f32 or bf16: --dtype")
		}
		if _, err := w.Write(bytes); err != nil {
			return err
		}
	}
	return nil
}
