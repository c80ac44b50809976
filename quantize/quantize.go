package quantize

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/safetensors"
)

// None is the format of a tensor that is copied unquantized.
const None dtype.Format = "none"

// formatNames are the formats that a checkpoint can be quantized to.
var formatNames = []string{string(dtype.MXFP8), string(dtype.NVFP4)}

// ParseFormat returns the format of that name to quantize to.
func ParseFormat(name string) (dtype.Format, error) {
	if slices.Contains(formatNames, name) {
		return dtype.Format(name), nil
	}
	return None, unknown("format", name, formatNames)
}

// A Layout is the family of loaders that a checkpoint is written for.
type Layout uint8

// The layouts.
const (
	CompressedTensors Layout = iota
	ModelOpt
)

var layoutNames = []string{"compressed-tensors", "modelopt"}

// String gives the name as people write it.
func (l Layout) String() string { return layoutNames[l] }

// MarshalText writes the name into JSON.
func (l Layout) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText reads a name from JSON.
func (l *Layout) UnmarshalText(text []byte) (err error) {
	*l, err = ParseLayout(string(text))
	return err
}

// ParseLayout finds a layout by its name.
func ParseLayout(name string) (Layout, error) {
	if i := slices.Index(layoutNames, name); i >= 0 {
		return Layout(i), nil
	}
	return 0, unknown("layout", name, layoutNames)
}

func unknown(what, name string, names []string) error {
	return diag.New(diag.BadUsage, "there is no %s %q", what, name).
		Meant(name, names, "did you mean %s?", names[0]+" or "+names[1])
}

// Options describe the quantized checkpoint.
type Options struct {
	To     dtype.Format
	Layout Layout
	// Skip lists linear layers that stay as they are: names of modules, with * for any letters.
	Skip []string
	// Policy chooses for each linear layer; nil gives To to all of them.
	Policy Policy
	// InputAmax is the largest activation that NVFP4's global scale for activations is made for; 0
	// writes none, and the checkpoint says that weights alone are quantized.
	InputAmax float32
	// MaxBytes bounds the tensors of one file; 0 means 5 GB, as package capture has it. It is also
	// what is done again at most when work that was stopped goes on.
	MaxBytes int64
	// Workers is the number of chunks in flight; 0 means twice the processors, so that some compute
	// while others wait for the disk.
	Workers int
	Events  event.Sink
}

// version is the version of quantize.json and of the rules that determine the bytes of weights.
const version = 1

// A job is the turning of one source.
type job struct {
	Options
	src   *source
	out   string
	key   string
	files []*file
	total int64 // bytes of the source's tensors
	meter meter
	shelf *shelf
}

// Quantize turns the checkpoint in the folder dir into a quantized one in the folder out, which is
// new, empty, or what an earlier call with the same arguments left. It tells of every tensor.
func Quantize(ctx context.Context, dir, out string, o Options) (*Report, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	src, err := openSource(dir)
	if err != nil {
		return nil, err
	}
	defer src.close()
	j := &job{Options: o, src: src, out: out, total: src.bytes(),
		shelf: newShelf()}
	if err := j.plan(); err != nil {
		return nil, err
	}
	folder, err := j.enter()
	if err != nil {
		return nil, err
	}
	defer folder.leave()
	if r := folder.done; r != nil {
		return r, nil
	}
	if err := j.run(ctx, folder); err != nil {
		return nil, err
	}
	return j.finish(folder)
}

func (o *Options) defaults() error {
	if o.To != dtype.MXFP8 && o.To != dtype.NVFP4 {
		return diag.New(diag.BadUsage, "there is no format to quantize to").Try("mxfp8 or nvfp4")
	}
	if o.InputAmax < 0 || math.IsNaN(float64(o.InputAmax)) || math.IsInf(float64(o.InputAmax), 0) {
		return diag.New(diag.BadUsage, "no activation is %v at most", o.InputAmax)
	}
	if o.InputAmax > 0 && o.To == dtype.MXFP8 {
		return diag.New(diag.BadUsage, "mxfp8 has no scale for activations that is known before").
			Because("each block finds its own at run time").Try("leave --input-amax out")
	}
	o.MaxBytes = cmp.Or(o.MaxBytes, 5e9)
	o.Workers = cmp.Or(o.Workers, 2*runtime.GOMAXPROCS(0))
	o.Events = cmp.Or(o.Events, event.Discard)
	return nil
}

// plan decides what becomes of every tensor, and in which file it stands.
func (j *job) plan() error {
	choices, err := choose(j.src, j.Options)
	if err != nil {
		return err
	}
	works, err := j.works(choices)
	if err != nil {
		return err
	}
	if j.files, err = splitFiles(works, j.MaxBytes); err != nil {
		return err
	}
	digest, err := j.src.digest()
	if err != nil {
		return err
	}
	// What decides over the bytes: the source, and the choice for each tensor.
	h := sha256.New()
	fmt.Fprintf(h, "%d %s %v %v %v %d\n", version, digest, j.To, j.Layout, j.InputAmax, j.MaxBytes)
	for _, c := range choices {
		fmt.Fprintf(h, "%s %v %s\n", c.tensor.Name(), c.format, c.why)
		if t := c.tensor.Shape().Type; c.format == None && j.src.castType(t) != t {
			fmt.Fprintf(h, "as %v\n", j.src.castType(t))
		}
	}
	j.key = fmt.Sprintf("%x", h.Sum(nil))
	return nil
}

// works lists what is to be done, in the order of the tensors' names.
func (j *job) works(choices []choice) ([]work, error) {
	groups := map[string]*group{}
	var list []work
	for _, c := range choices {
		switch {
		case j.src.mxfp4 && strings.HasSuffix(c.tensor.Name(), "_blocks"):
			w, err := j.experts(c)
			if err != nil {
				return nil, err
			}
			list = append(list, w)
		case j.src.mxfp4 && strings.HasSuffix(c.tensor.Name(), "_scales"):
			// They go with the blocks.
		case j.src.mxfp4 && j.Layout == CompressedTensors && isExpertBias(c.tensor):
			list = append(list, newBiases(c))
		case c.format == None:
			list = append(list, newKeep(c, j.src.castType(c.tensor.Shape().Type)))
		default:
			w := newQuantizedMatrix(c, j.Options)
			list = append(list, w)
			if c.format != dtype.NVFP4 {
				break
			}
			if groups[c.patron] == nil {
				groups[c.patron] = &group{known: make(chan struct{})}
			}
			w.group = groups[c.patron]
			w.group.members = append(w.group.members, w)
			w.group.left.Add(int64(w.chunks()))
			w.why = make([][]uint16, w.chunks())
		}
	}
	isExperts := func(w work) bool { _, ok := w.(*experts); return ok }
	if j.src.mxfp4 && !slices.ContainsFunc(list, isExperts) {
		return nil, diag.New(diag.WeightQuantized,
			"config.json says mxfp4, but no tensor is called *_blocks").At("%s", j.src.dir)
	}
	return list, nil
}

// finish writes the small files, config.json as the last of them, and ends the work.
func (j *job) finish(f *outFolder) (*Report, error) {
	r := &Report{Version: version, Format: j.To, Layout: j.Layout, Key: j.key, BytesIn: j.total}
	for _, file := range j.files {
		r.Files = append(r.Files, file.name)
		r.BytesOut += file.size
		r.Tensors = append(r.Tensors, file.rows...)
	}
	lists.Sort(r.Tensors, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	if len(j.files) > 1 {
		if err := f.write(safetensors.IndexName, index(j.files)); err != nil {
			return nil, err
		}
	}
	// The files must be readable as one model before the folder is called whole.
	set, err := safetensors.Open(j.out)
	if err != nil {
		return nil, err
	}
	if err := set.Close(); err != nil {
		return nil, err
	}
	if err := capture.Accompany(j.out, j.src.dir); err != nil {
		return nil, err
	}
	if j.Layout == ModelOpt {
		if err := f.writeJSON("hf_quant_config.json", j.hfQuantConfig()); err != nil {
			return nil, err
		}
	}
	if err := f.writeJSON(reportName, r); err != nil {
		return nil, err
	}
	if err := f.writeJSON(configName, j.config()); err != nil {
		return nil, err
	}
	return r, f.clear()
}

const reportName = "quantize.json"

// index is the map from tensors to files, in the form of transformers.
func index(files []*file) []byte {
	homes := map[string]string{}
	total := int64(0)
	for _, f := range files {
		for _, o := range f.outputs {
			homes[o.name] = f.name
			total += o.shape.Bytes()
		}
	}
	return safetensors.Index(homes, total)
}

func unwritten(path string, err error) error {
	return diag.New(diag.FileError, "cannot write %s", filepath.Base(path)).At("%s", path).Wrap(err)
}
