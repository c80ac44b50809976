package capture

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

const (
	configName = "config.json"
	// maxConfig bounds config.json, which has some kilobytes; lists of labels make the longest
	// published ones about a megabyte.
	maxConfig = 16 << 20
)

// Options say where Open looks.
type Options struct {
	// Getenv gives the variables that say where the Hugging Face cache is; nil is os.Getenv.
	Getenv func(string) string
}

// A Model is a model that was found: what it is, and what of it is on this machine.
type Model struct {
	// Name is what a person calls it: the preset's, the repository's, or the folder's.
	Name string
	// Config is its configuration. Of a program it is the decoder of the same sizes, by which it is
	// planned and priced, or nil for one that is no decoder.
	Config *model.Config
	// Program is what torch.export saved, with weights of its own; nil for other sources.
	Program *Program
	Note    string // what a person should know of a preset

	// Folder holds the model's files; "" for a preset and for a configuration alone.
	Folder string
	// Tokenizer is the file of the tokenizer, tokenizer.json or tokenizer.model; "" for none.
	Tokenizer string
	// Missing lists files of weights that the index names and the folder has not. While there are
	// any, the model has no weights.
	Missing []string

	source   []byte // config.json as it came
	weights  *safetensors.Set
	tensors  []string    // their names, sorted, from the files or from the index
	size     int64       // bytes of all tensors, as the index says
	spelling spelling    // of names in the files
	lack     *diag.Error // see Lack
	unlike   string      // why a program is not like a decoder; "" if it is
	fetch    string      // what to do to get what is missing; "" where nothing is known
}

// Open finds a model by its source, as the package comment lists them.
func Open(source string, o Options) (*Model, error) {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if name, ok := strings.CutPrefix(source, "hf:"); ok {
		return openHub(name, o)
	}
	if name, ok := strings.CutPrefix(source, "preset:"); ok {
		return openPreset(name)
	}
	info, err := os.Stat(source)
	preset := findPreset(source)
	switch {
	case source == "":
		return nil, diag.New(diag.BadUsage, "no model is named").Try("deepwell models")
	case err == nil && preset != nil && isModel(source, info):
		return nil, diag.New(diag.BadUsage, "%q is a preset, and here also a folder", source).
			Try(".%c%s for the folder, or preset:%s", filepath.Separator, source, source)
	case preset != nil:
		return fromPreset(preset)
	case err == nil && info.IsDir():
		return openFolder(source, filepath.Base(absolute(source)), "")
	case err == nil:
		return openFile(source)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, diag.New(diag.FileError, "cannot read %s", source).Wrap(err)
	}
	return nil, unknown(source)
}

// isModel reports whether what stands at a path is a folder that holds a model.
func isModel(path string, info fs.FileInfo) bool {
	_, err := os.Stat(filepath.Join(path, configName))
	return info.IsDir() && err == nil
}

// absolute gives a folder such as "." the name that it has.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// findPreset gives the preset that a word means. A path is not a preset: model.Find does not look
// at what stands before the last slash, so of names with a slash only whole aliases count.
func findPreset(name string) *model.Preset {
	p, err := model.Find(name)
	if err != nil {
		return nil
	}
	same := func(alias string) bool { return strings.EqualFold(alias, name) }
	if strings.ContainsAny(name, `/\`) && !slices.ContainsFunc(p.Aliases, same) {
		return nil
	}
	return p
}

func openPreset(name string) (*Model, error) {
	p, err := model.Find(name)
	if err != nil {
		e := diag.New(diag.ModelUnknown, "no preset is called %q", name).Try("deepwell models")
		if near := nearest(name); near != "" {
			e = e.Try("did you mean %s?", near)
		}
		return nil, e
	}
	return fromPreset(p)
}

func fromPreset(p *model.Preset) (*Model, error) {
	if p.Config == nil {
		return nil, diag.New(diag.ModelMissing, "the sizes of %s are not public", p.Name).
			Because("%s", p.Note).Try("give the folder of the model, or another one of: deepwell models")
	}
	m := &Model{Name: p.Name, Config: p.Config, Note: p.Note}
	for _, alias := range p.Aliases {
		if looksLikeRepo(alias) {
			m.fetch = "hf:" + alias
			break
		}
	}
	return m, nil
}

// unknown is the error for a source that leads nowhere, with what the person may have meant.
func unknown(source string) error {
	e := diag.New(diag.ModelUnknown, "%q is neither a preset nor a folder", source)
	switch {
	case looksLikeRepo(source):
		return e.Try("hf:%s, if it is a repository of the Hugging Face Hub", source)
	case strings.HasSuffix(source, ".json"):
		return diag.New(diag.ModelUnknown, "there is no file %s", source)
	}
	if near := nearest(filepath.Base(source)); near != "" {
		return e.Try("did you mean %s?", near)
	}
	return e.Try("deepwell models lists the presets; a folder needs a %s", configName)
}

// nearest lists up to three presets that a typed name may have meant, the best first.
func nearest(typed string) string {
	names := lists.Map(model.Presets(), func(p model.Preset) string { return p.Name })
	var found []string
	for range 3 {
		best := diag.Nearest(strings.ToLower(typed), names)
		if best == "" {
			break
		}
		found = append(found, best)
		names = slices.DeleteFunc(names, func(n string) bool { return n == best })
	}
	return strings.Join(found, ", ")
}

// readConfig reads a config.json.
func readConfig(f *safedir.Folder, name string) (*model.Config, []byte, error) {
	text, err := f.Read(name, maxConfig)
	if err != nil {
		return nil, nil, err
	}
	c, err := model.Parse(text)
	if err != nil {
		e, where := diag.From(err), f.Path(name)
		if e.Where != "" {
			where += ", " + strings.TrimSuffix(e.Where, " of "+configName)
		}
		return nil, nil, e.At("%s", where)
	}
	return c, text, nil
}

// openFile reads a program, or a configuration alone.
func openFile(path string) (*Model, error) {
	dir, file := filepath.Dir(path), filepath.Base(path)
	switch filepath.Ext(file) {
	case ".json":
	case ".pt2":
		return openProgram(path)
	case ".safetensors":
		return nil, diag.New(diag.BadInput, "%s holds weights, but not what they are weights of", path).
			Try("give the folder, with %s in it: %s", configName, dir)
	default:
		return nil, diag.New(diag.BadInput, "%s is not a model", path).
			Try("give a folder with %s, or such a file, or what torch.export.save wrote: *.pt2",
				configName)
	}
	f, err := safedir.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c, text, err := readConfig(f, file)
	if err != nil {
		return nil, err
	}
	m := &Model{Name: filepath.Base(absolute(dir)), Config: c, source: text}
	if file == configName {
		m.lack = alone(dir)
	}
	return m, nil
}

// alone is the error for a config.json that is named alone though weights stand beside it, whole or
// not; nil without weights.
func alone(dir string) *diag.Error {
	set, err := safetensors.Open(dir)
	if err == nil {
		_ = set.Close()
	} else if diag.From(err).Code == diag.ModelMissing {
		return nil
	}
	return diag.New(diag.WeightsIncomplete, "weights stand beside %s, which is named alone",
		configName).At("%s", dir).Try("name the folder to begin with its weights: %s", dir)
}

// openFolder reads the configuration of a folder and the headers of its weights. fetch is the
// command that brings missing files.
func openFolder(dir, name, fetch string) (*Model, error) {
	f, err := safedir.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m := &Model{Name: name, Folder: dir, fetch: fetch}
	if m.Config, m.source, err = readConfig(f, configName); errors.Is(err, fs.ErrNotExist) {
		return nil, m.noConfig(f)
	}
	if err != nil {
		return nil, err
	}
	for _, file := range []string{"tokenizer.json", "tokenizer.model"} {
		if m.Tokenizer == "" && f.Has(file) {
			m.Tokenizer = filepath.Join(dir, file)
		}
	}
	if err := m.openWeights(f); err != nil {
		return nil, err
	}
	return m, nil
}

// noConfig is the error for a folder without a configuration, with what is there instead.
func (m *Model) noConfig(f *safedir.Folder) error {
	e := diag.New(diag.BadInput, "the folder has no %s", configName).At("%s", m.Folder)
	if m.fetch != "" {
		return e.Try("%s", m.fetch)
	}
	names, _ := f.Names()
	for _, name := range names {
		switch {
		case f.Has(filepath.ToSlash(filepath.Join(name, configName))):
			return e.Try("did you mean %s?", filepath.Join(m.Folder, name))
		case strings.HasPrefix(name, "consolidated."):
			return e.Because("%s is a file of Meta's own form", name).
				Try("take the form of Hugging Face: a folder with %s and *.safetensors", configName)
		case filepath.Ext(name) == ".gguf":
			return e.Because("%s is a file for inference", name).
				Try("take the original: a folder with %s and *.safetensors", configName)
		}
	}
	if repo, ok := repoOf(filepath.Base(absolute(m.Folder))); ok {
		return e.Try("hf:%s", repo)
	}
	return e.Try("give the folder that holds %s", configName)
}

// Close ends the use of the model's files.
func (m *Model) Close() error {
	if m.Program != nil {
		return m.Program.Close()
	}
	if m.weights == nil {
		return nil
	}
	return m.weights.Close()
}

// HasWeights reports whether the model's weights are here to be read.
func (m *Model) HasWeights() bool {
	return m.weights != nil || m.Program != nil && m.lack == nil
}

// Trained is the model as programs are made of it: its configuration's, or the program itself.
func (m *Model) Trained() model.Model {
	if m.Program != nil {
		return m.Program
	}
	return m.Config
}

// Parameters counts what is learned.
func (m *Model) Parameters() int64 {
	if m.Program != nil {
		return m.Program.Parameters()
	}
	return m.Config.Count().Total
}

// Likeness is the configuration by which a model is planned and priced, or the error of a program
// that is no decoder.
func (m *Model) Likeness() (*model.Config, error) {
	if m.Config == nil {
		return nil, diag.New(diag.NotSupported, "%s is not a decoder whose plans can be priced", m.Name).
			Because("as far as its parameters show, %s", m.unlike).
			Try("train it without a plan, or write one: deepwell train --plan")
	}
	return m.Config, nil
}
