package capture

import (
	"bytes"
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/model"
)

// companions are the files beside weights and configuration that belong to a model.
var companions = []string{generationName, "tokenizer.json", "tokenizer.model",
	"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
	"merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
	"processor_config.json"}

const (
	generationName = "generation_config.json"
	// templatesName is where transformers keeps chat templates beside the first.
	templatesName = "additional_chat_templates"
	// SourceConfig is the name, in the folder of a run, of the config.json that its model came with:
	// under its own name it would make the folder look like a model.
	SourceConfig = "source_config.json"
	// maxCompanion bounds a file that is copied; the largest tokenizer.json have some 35 MB.
	maxCompanion = 256 << 20
)

// Accompany copies the files that belong to a model beside its weights and configuration, such as
// tokenizer and chat templates, from one folder to another; only those named, if any are.
func Accompany(dir, from string, only ...string) error {
	f, err := safedir.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	there, err := f.Names()
	if err != nil {
		return err
	}
	names := lists.Filter(there, func(name string) bool {
		return slices.Contains(companions, name) && (only == nil || slices.Contains(only, name)) &&
			f.Has(name) // not a link that leads out
	})
	if f.Has(templatesName) && only == nil {
		sub, err := safedir.Open(f.Path(templatesName))
		if err != nil {
			return err
		}
		defer sub.Close()
		templates, err := sub.Names()
		if err != nil {
			return err
		}
		for _, name := range templates {
			if strings.HasSuffix(name, ".jinja") {
				names = append(names, path.Join(templatesName, name))
			}
		}
	}
	for _, name := range names {
		text, err := f.Read(name, maxCompanion)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.FromSlash(name))
		err = os.MkdirAll(filepath.Dir(to), 0o777)
		if err == nil {
			err = atomicfile.Write(to, text, 0o666)
		}
		if err != nil {
			return diag.New(diag.FileError, "cannot write %s", to).Wrap(err)
		}
	}
	return nil
}

// DTypeOf gives the element type that a config.json says weights have; Invalid where it does not.
func DTypeOf(config []byte) dtype.DType {
	var c struct {
		DType any `json:"dtype"`
		Torch any `json:"torch_dtype"`
	}
	if json.Unmarshal(config, &c) != nil {
		return dtype.Invalid
	}
	for _, v := range []any{c.DType, c.Torch} {
		name, _ := v.(string)
		for t, known := range typeNames {
			if strings.TrimPrefix(name, "torch.") == known {
				return t
			}
		}
	}
	return dtype.Invalid
}

// typeNames are the names of element types in config.json.
var typeNames = map[dtype.DType]string{dtype.F32: "float32", dtype.BF16: "bfloat16",
	dtype.F16: "float16"}

// withDType gives a config.json that says of which type weights are, under the key that it has for
// it. Nothing else in it is changed.
func withDType(config []byte, t dtype.DType) ([]byte, error) {
	c, err := object(config)
	if err != nil {
		return nil, err
	}
	setDType(c, t)
	return strictjson.Encode(c)
}

func setDType(c map[string]any, t dtype.DType) {
	key := "dtype"
	if _, ok := c["torch_dtype"]; ok && c["dtype"] == nil {
		key = "torch_dtype"
		delete(c, "dtype")
	}
	c[key] = typeNames[t]
}

func object(text []byte) (c map[string]any, err error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber() // what is not ours goes out as it came in
	err = dec.Decode(&c)
	return c, err
}

// configOf writes the config.json of an export: the one that the model came with, where it says the
// same model, with all that Deepwell does not understand; else one of our own.
func configOf(c *model.Config, source []byte, t dtype.DType) ([]byte, error) {
	own, err := c.Write()
	if err != nil {
		return nil, err
	}
	if back, err := model.Parse(source); source == nil || err != nil || !reflect.DeepEqual(back, c) {
		return withDType(own, t)
	}
	out, err := object(source)
	if err != nil {
		return nil, err
	}
	if out["architectures"] == nil {
		ours, err := object(own)
		if err != nil {
			return nil, err
		}
		out["architectures"] = ours["architectures"]
	}
	delete(out, "auto_map")            // code that is not copied
	delete(out, "quantization_config") // weights are written without scales
	if out[mtpKey] != nil {
		out[mtpKey] = json.RawMessage("0") // such layers are not taken
	}
	setDType(out, t)
	return strictjson.Encode(out)
}

// Source gives the config.json that the model came with, and the element type that it has: what the
// configuration says, or else the type of most tensors. Both are empty for a preset.
func (m *Model) Source() ([]byte, dtype.DType) {
	if m.Program != nil {
		return nil, m.Program.Type()
	}
	t := DTypeOf(m.source)
	if c := m.Contents(); t == dtype.Invalid && c != nil && c.Types != nil {
		most := 0
		for of := range typeNames {
			if n := c.Types[of.String()]; n > most {
				t, most = of, n
			}
		}
	}
	return m.source, t
}

// KeepSource writes into the folder of a run what an export needs to write the model as it came:
// its config.json, with the element type, and generation_config.json; or the program.
func (m *Model) KeepSource(run string) error {
	if m.Program != nil {
		return m.Program.keep(run)
	}
	if m.source == nil {
		return nil
	}
	text, t := m.Source()
	if t != dtype.Invalid {
		var err error
		if text, err = withDType(text, t); err != nil {
			return err
		}
	}
	if err := atomicfile.Write(filepath.Join(run, SourceConfig), text, 0o666); err != nil {
		return err
	}
	if m.Folder == "" {
		return nil
	}
	return Accompany(run, m.Folder, generationName)
}
