package pt2

import (
	"hash/crc32"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/internal/strided"
)

// A Tensor is a view of a storage.
type Tensor struct {
	Name    string
	Type    dtype.DType
	Dims    []int64
	Strides []int64 // in elements; 0 along an expanded dimension
	Offset  int64   // of the first element in the storage, in elements
	Storage string  // such as weights/weight_3: tensors with equal ones share memory
	Param   bool    // a parameter, not a buffer or constant
	Meta    bool    // the program was exported without numbers: there is nothing to read

	archive *Archive
	entry   entry
}

// Shape is the type and the dimensions.
func (t *Tensor) Shape() dtype.Shape { return dtype.Shape{Type: t.Type, Dims: t.Dims} }

const (
	// maxRank bounds the dimensions of a tensor; NumPy 2 has the same bound (NPY_MAXDIMS).
	maxRank = 64
	// spread bounds the bytes of a tensor that is larger than the file, since it is expanded: a
	// mask or a table of positions, not a weight.
	spread = 64 << 20
)

// parseConfig reads the list of tensors in a folder, {"config": {name: {path_name, …}}}.
func parseConfig(text string, z *zipFile, folder string) (list []*Tensor, err error) {
	p := parser{Scanner: strictjson.Scan(text), exprs: map[string]Expr{}}
	seen := map[string]bool{}
	err = p.Unique(func(key string) error {
		if key != "config" {
			return p.Skip()
		}
		seen[key] = true
		return p.Object(func(name string) error {
			if seen["."+name] {
				return damaged("tensor %s stands twice", human.Quote(name))
			}
			seen["."+name] = true
			if err := p.checkName(name, false); err != nil {
				return err
			}
			t, err := p.stored(z, folder)
			if err != nil {
				return within(err, "tensor "+human.Quote(name))
			}
			t.Name = name
			list = append(list, t)
			return nil
		})
	})
	if err == nil {
		err = p.End("the list of tensors")
	}
	if err == nil && !seen["config"] {
		err = damaged("the list of tensors has no config")
	}
	return list, err
}

// stored reads what is said of one tensor, and finds its storage.
func (p *parser) stored(z *zipFile, folder string) (*Tensor, error) {
	t := &Tensor{}
	var meta *tensorMeta
	path := ""
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "path_name":
			path, err = p.Text()
		case "is_param":
			t.Param, err = p.Flag()
		case "use_pickle":
			var pickled bool
			if pickled, err = p.Flag(); pickled {
				return diag.New(codeFormat, "it is stored as a pickle, which can run code and is not read").
					Because("torch stores tensor subclasses and custom objects so").
					Try("replace it by a plain tensor before the export")
			}
		case "tensor_meta":
			if p.Null() {
				return damaged("it is no tensor")
			}
			meta, err = p.meta(true)
		default:
			return p.Skip()
		}
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case meta == nil || path == "":
		return nil, damaged("path_name or tensor_meta is missing")
	}
	e, ok := z.entries[folder+path]
	if !ok || strings.Contains(path, "/") {
		return nil, damaged("its storage %s is not in the archive", human.Quote(path))
	}
	t.Type, t.entry = meta.Type, e
	t.Storage = folder[strings.Index(folder, "/data/")+len("/data/"):] + path
	if err := t.place(meta); err != nil {
		return nil, err
	}
	return t, t.fit(meta.device, z.size)
}

// place takes over dimensions, strides and offset, which must be plain numbers.
func (t *Tensor) place(meta *tensorMeta) error {
	if len(meta.Dims) > maxRank || len(meta.strides) != len(meta.Dims) {
		return damaged("it has %d dimensions and %d strides", len(meta.Dims), len(meta.strides))
	}
	if meta.layout != strided7 {
		return damaged("its layout is %s; only strided tensors are read", layouts[meta.layout]).
			Try("make it dense before the export")
	}
	for i := range meta.Dims {
		size, fixed := meta.Dims[i].Const()
		stride, also := meta.strides[i].Const()
		if !fixed || !also || size < 0 || stride < 0 {
			return damaged("dimension %v with stride %v", meta.Dims[i], meta.strides[i])
		}
		t.Dims, t.Strides = append(t.Dims, size), append(t.Strides, stride)
	}
	offset, fixed := meta.offset.Const()
	if !fixed || offset < 0 {
		return damaged("its offset is %v", meta.offset)
	}
	t.Offset = offset
	return nil
}

// fit checks that the view lies within its storage, and that it is not much larger than the file.
func (t *Tensor) fit(device Word, file int64) error {
	width := int64(t.Type.Bits() / 8)
	bytes, last, empty := width, t.Offset, false // last is the last element
	for i, d := range t.Dims {
		if d == 0 {
			empty = true
			continue
		}
		n, ok1 := mul(bytes, d)
		step, ok2 := mul(d-1, t.Strides[i])
		at, ok3 := add(last, step)
		if !ok1 || !ok2 || !ok3 {
			return damaged("the size of %v with strides %v overflows", t.Shape(), t.Strides)
		}
		bytes, last = n, at
	}
	end, ok := mul(last, width)
	if ok {
		end, ok = add(end, width)
	}
	t.Meta = device == "meta" || t.entry.size == 0 && !empty
	switch {
	case empty || t.Meta:
		return nil
	case !ok || end > t.entry.size:
		return damaged("%v with strides %v and offset %d does not fit into its storage of %d bytes",
			t.Shape(), t.Strides, t.Offset, t.entry.size)
	case bytes > max(spread, file):
		return damaged("it is expanded to %d bytes; at most %d are read", bytes, max(spread, file))
	}
	return nil
}

// Bytes gives the elements row by row in their own type, little-endian. It is a copy.
func (t *Tensor) Bytes() ([]byte, error) {
	if err := t.readable(); err != nil {
		return nil, err
	}
	dst := make([]byte, t.Shape().Bytes())
	return dst, t.stream(func(at int, part []byte) { copy(dst[at:], part) })
}

// Read fills dst with the elements as float32, row by row. Integers and flags are converted;
// complex numbers are refused.
func (t *Tensor) Read(dst []float32) error {
	if err := t.readable(); err != nil {
		return err
	}
	kind, width := t.Type.Kind(), t.Type.Bits()/8
	switch n := t.Shape().Elements(); {
	case int64(len(dst)) != n:
		return t.fail(diag.New(codeCaller, "%s has %d elements, and %d are asked for",
			human.Quote(t.Name), n, len(dst)))
	case kind == dtype.Complex:
		return t.fail(diag.New(codeType, "%s is %v, which is not real", human.Quote(t.Name), t.Shape()))
	}
	return t.stream(func(at int, part []byte) {
		into := dst[at/width:][:len(part)/width]
		if kind == dtype.Float || kind == dtype.Scale {
			t.Type.Decode(into, part)
			return
		}
		for i, v := range t.Type.Values(part) {
			into[i] = float32(v)
		}
	})
}

func (t *Tensor) readable() error {
	if !t.Meta {
		return nil
	}
	return t.fail(diag.New(codeCaller, "%s was stored without its values", human.Quote(t.Name)).
		Because("the module was exported from the meta device").
		Try("load the weights into the module, and export it again"))
}

// chunk bounds what is read at once; elements of any type fill it.
const chunk = 1 << 20

// stream gives the elements to take, row by row and in chunks; at is where one begins. A tensor
// whose elements are not next to each other in the file is one chunk.
func (t *Tensor) stream(take func(at int, part []byte)) error {
	size, width := t.Shape().Bytes(), int64(t.Type.Bits()/8)
	begin := t.entry.at + t.Offset*width
	if size == 0 {
		return nil
	}
	last, dense := int64(0), true // last is the last element of the view, counted from its first
	axes := make([]strided.Axis, len(t.Dims))
	for i, step := len(t.Dims)-1, int64(1); i >= 0; i-- {
		last += (t.Dims[i] - 1) * t.Strides[i]
		axes[i] = strided.Axis{N: t.Dims[i], Src: t.Strides[i], Dst: step}
		dense = dense && (t.Dims[i] == 1 || t.Strides[i] == step)
		step *= t.Dims[i]
	}
	if !dense {
		src, dst := make([]byte, (last+1)*width), make([]byte, size)
		if err := t.archive.zip.fill(src, begin); err != nil {
			return t.fail(err)
		}
		strided.Copy(dst, src, width, axes)
		take(0, dst)
		return nil
	}
	crc := uint32(0)
	buf := make([]byte, min(size, chunk))
	for at := int64(0); at < size; at += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), size-at)]
		if err := t.archive.zip.fill(buf, begin+at); err != nil {
			return t.fail(err)
		}
		crc = crc32.Update(crc, crc32.IEEETable, buf)
		take(int(at), buf)
	}
	if size == t.entry.size && crc != t.entry.crc {
		return t.fail(changed(t.entry.name))
	}
	return nil
}

func (t *Tensor) fail(err error) error { return locate(err, t.archive.name) }
