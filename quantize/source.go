package quantize

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/safetensors"
)

const (
	configName = "config.json"
	// maxConfig bounds config.json, as package capture does.
	maxConfig = 16 << 20
)

// A source is the checkpoint that is read.
type source struct {
	dir     string
	config  map[string]any
	set     *safetensors.Set
	tensors []safetensors.Tensor // by name
	dtype   dtype.DType          // of the model
	mxfp4   bool                 // experts are in MXFP4, as gpt-oss has them
}

func openSource(dir string) (*source, error) {
	f, err := safedir.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := f.Read(configName, maxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.BadInput, "the folder has no %s", configName).At("%s", dir).
			Try("give a folder that transformers loads")
	}
	if err != nil {
		return nil, err
	}
	s := &source{dir: dir}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber() // what is not ours goes out as it came in
	if err := dec.Decode(&s.config); err != nil || s.config == nil {
		return nil, diag.New(diag.BadInput, "%s is not a JSON object", configName).
			At("%s", f.Path(configName)).Wrap(err).Try("fetch the file again")
	}
	if err := s.method(f); err != nil {
		return nil, err
	}
	if s.set, err = safetensors.Open(dir); err != nil {
		return nil, err
	}
	for _, name := range s.set.Names() {
		t, err := s.set.Tensor(name)
		if err == nil {
			err = s.plain(t)
		}
		if err != nil {
			s.close()
			return nil, err
		}
		s.tensors = append(s.tensors, t)
	}
	s.dtype = s.own(text)
	return s, nil
}

// close ends the use of the files; they were only read.
func (s *source) close() { _ = s.set.Close() }

// method refuses a checkpoint that is quantized already, except in gpt-oss's MXFP4.
func (s *source) method(f *safedir.Folder) error {
	var method string
	switch q := s.config["quantization_config"].(type) {
	case nil:
		if !f.Has("hf_quant_config.json") {
			return nil
		}
		method = "modelopt"
	case map[string]any:
		method, _ = q["quant_method"].(string)
	}
	if s.mxfp4 = method == "mxfp4"; s.mxfp4 {
		return nil
	}
	return diag.New(diag.WeightQuantized, "the weights are quantized already, by %s",
		cmp.Or(method, "a method without a name")).
		At("%s", f.Path(configName)).
		Because("what one rounding has lost, another cannot find again").
		Try("take the checkpoint that this one was made of")
}

// plain refuses weights that are quantized though config.json does not say so.
func (s *source) plain(t safetensors.Tensor) error {
	if !strings.HasSuffix(t.Name(), ".weight") {
		return nil
	}
	switch t.Shape().Type {
	case dtype.F8E4M3FN, dtype.F8E5M2, dtype.F8E8M0FNU, dtype.F4E2M1FN, dtype.U8, dtype.S8:
		return diag.New(diag.WeightQuantized, "%s is %s already", t.Name(), t.Shape().Type).
			At("%s", t.File()).Try("take the checkpoint that this one was made of")
	}
	return nil
}

// sampled is how much of a tensor's head and of its tail enters the digest of a source.
const sampled = 4 << 10

// digest tells one source from another: the configuration, every tensor's name and shape, and the
// ends of its data. A model that was trained on differs in all of them.
func (s *source) digest() (string, error) {
	h := sha256.New()
	text, err := json.Marshal(s.config)
	if err != nil {
		return "", err
	}
	h.Write(text)
	buf := make([]byte, sampled)
	for _, t := range s.tensors {
		fmt.Fprintf(h, "\n%s %v ", t.Name(), t.Shape())
		for _, at := range []int64{0, max(0, t.Size()-sampled)} {
			n := min(sampled, t.Size()-at)
			if _, err := t.ReadAt(buf[:n], at); err != nil {
				return "", err
			}
			_ = binary.Write(h, binary.LittleEndian, n)
			h.Write(buf[:n])
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// bytes is the size of all tensors.
func (s *source) bytes() (n int64) {
	return lists.Sum(s.tensors, func(t safetensors.Tensor) int64 { return t.Size() })
}

func (s *source) tensor(name string) (safetensors.Tensor, bool) {
	i, ok := slices.BinarySearchFunc(s.tensors, name, func(t safetensors.Tensor, name string) int {
		return strings.Compare(t.Name(), name)
	})
	if !ok {
		return safetensors.Tensor{}, false
	}
	return s.tensors[i], true
}

// castType is the type in which an unquantized tensor is written: BF16 in a model that is not in
// BF16, since loaders run GEMMs of quantized weights in BF16 and other operands must match. In a
// BF16 model, tensors of other types are so on purpose.
func (s *source) castType(t dtype.DType) dtype.DType {
	float := t == dtype.F32 || t == dtype.F16 || t == dtype.F64
	if float && !s.mxfp4 && s.dtype != dtype.BF16 {
		return dtype.BF16
	}
	return t
}

// own is the element type of the model: its configuration's, or the type of most elements.
func (s *source) own(config []byte) dtype.DType {
	if t := capture.DTypeOf(config); t != dtype.Invalid {
		return t
	}
	counts := map[dtype.DType]int64{}
	most := dtype.BF16
	for _, t := range s.tensors {
		if kind := t.Shape().Type; kind.Kind() == dtype.F32.Kind() {
			counts[kind] += t.Shape().Elements()
			if counts[kind] > counts[most] {
				most = kind
			}
		}
	}
	return most
}
