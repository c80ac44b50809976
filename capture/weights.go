package capture

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

const (
	weightsName = "model.safetensors"
	indexName   = weightsName + ".index.json"
	// maxIndex is the bound that package safetensors has for an index.
	maxIndex = 100_000_000
)

// openWeights opens the files of weights. A folder without weights is a model all the same; where
// some are missing their names are taken from the index, and [Model.Lack] says what is wrong.
func (m *Model) openWeights(f *safedir.Folder) (err error) {
	if m.weights, err = safetensors.Open(m.Folder); err == nil {
		m.tensors = m.weights.Names()
		m.spelling = spellingOf(m.Config, m.tensors)
		return nil
	}
	lack := diag.From(err)
	m.weights = nil
	switch lack.Code {
	case diag.WeightsIncomplete:
	case diag.ModelMissing: // nothing here looks like weights
		if m.fetch != "" { // but in a repository of the Hub there are some
			m.lack = diag.New(diag.ModelMissing, "the weights of %s are not in the Hugging Face cache",
				m.Name).At("%s", m.Folder).Try("%s", m.fetch)
		}
		return nil
	default:
		return err
	}
	if m.lack = lack; m.fetch != "" {
		m.lack = lack.Try("%s", m.fetch)
	}
	if names, err := f.Names(); err != nil || !slices.Contains(names, indexName) {
		return err
	}
	return m.readIndex(f)
}

// readIndex takes the names of tensors from the index, and lists the files that are not here.
func (m *Model) readIndex(f *safedir.Folder) error {
	// Package safetensors reads the index strictly; after that, this sees what it saw.
	names, err := safetensors.Names(filepath.Join(m.Folder, indexName))
	if err != nil {
		return err
	}
	text, err := f.Read(indexName, maxIndex)
	if err != nil {
		return err
	}
	var index struct {
		Metadata json.RawMessage   `json:"metadata"`
		Files    map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return diag.New(diag.BadInput, "the index is not what transformers writes").
			At("%s", filepath.Join(m.Folder, indexName)).Wrap(err).Try("fetch the file again")
	}
	var metadata struct { // it may be anything, and is for show only
		Size float64 `json:"total_size"`
	}
	if json.Unmarshal(index.Metadata, &metadata) == nil && metadata.Size < 1<<62 {
		m.size = max(0, int64(metadata.Size))
	}
	for _, file := range index.Files {
		if !f.Has(file) {
			m.Missing = append(m.Missing, file)
		}
	}
	slices.Sort(m.Missing)
	m.Missing = slices.Compact(m.Missing)
	m.tensors = names
	m.spelling = spellingOf(m.Config, names)
	return nil
}

// A spelling is how a checkpoint begins names that a family begins otherwise, and what it puts
// before those that do not begin so, which is the output layer's alone.
type spelling struct{ from, to, head string }

// spellings are those in use. The files of GPT-2 on the Hub, and models saved without their output
// layer, lack the first word; text models extracted from vision models have one more.
var spellings = []spelling{{}, {from: "transformer."}, {from: "model."},
	{from: "model.", to: "language_model.model.", head: "language_model."},
	{from: "model.", to: "model.language_model."}}

// spellingOf tells by the first parameter, the table of tokens, how names are spelled.
func spellingOf(c *model.Config, names []string) spelling {
	params := c.Params()
	for _, s := range spellings {
		if len(params) == 0 {
			break
		}
		if _, ok := slices.BinarySearch(names, s.apply(params[0].Source)); ok {
			return s
		}
	}
	return spelling{}
}

func (s spelling) apply(name string) string {
	if rest, ok := strings.CutPrefix(name, s.from); ok {
		return s.to + rest
	}
	return s.head + name
}

// find gives a tensor's name as the checkpoint has it.
func (m *Model) find(name string) (string, bool) {
	for _, spelled := range []string{m.spelling.apply(name), name} {
		if _, ok := slices.BinarySearch(m.tensors, spelled); ok {
			return spelled, true
		}
	}
	return m.spelling.apply(name), false
}

// Check makes sure that every tensor that the parameters are made of is there, with the right shape
// and an element type that can be read. Of an index without files it compares names alone.
//
// Tensors that no parameter asks for are listed by [Model.Contents]. They are an error where they
// stand beside one that is used, as a bias beside its weight: then the configuration does not
// belong to the weights.
func (m *Model) Check() error {
	if m.Program != nil {
		return m.Lack() // the archive was compared with its program when it was opened
	}
	if len(m.tensors) == 0 {
		return m.absent()
	}
	var missing []string
	total := 0
	for _, p := range m.Config.Params() {
		for _, name := range p.Tensors() {
			total++
			spelled, ok := m.spelled(name)
			if !ok {
				missing = append(missing, spelled...)
				continue
			}
			if m.weights == nil {
				continue
			}
			if _, err := m.stored(&p, spelled); err != nil {
				return err
			}
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		missing = slices.Compact(missing)
		return diag.New(diag.WeightMismatch, "%d of %d tensors are not in the checkpoint: %s",
			len(missing), total, some(missing)).At("%s", m.Folder).
			Try("see that %s belongs to these weights", configName)
	}
	if beside := m.sort().beside; len(beside) > 0 {
		return diag.New(diag.WeightMismatch, "the configuration knows no %s", some(beside)).
			At("%s", m.Folder).Because("tensors of the same layers are used, so they are not another's").
			Try("see that %s belongs to these weights", configName)
	}
	return nil
}

func (m *Model) where(file string) string { return filepath.Join(m.Folder, file) }

// absent is the error of a model without weights where weights are wanted.
func (m *Model) absent() error {
	if m.lack != nil {
		return m.lack
	}
	e := diag.New(diag.ModelMissing, "%s has no weights here", m.Name)
	if m.Folder != "" {
		e = e.At("%s", m.Folder)
	}
	switch {
	case strings.HasPrefix(m.fetch, "hf:"):
		return e.Because("a preset is a configuration alone").Try("%s has weights", m.fetch)
	case m.Folder == "":
		return e.Because("a configuration alone begins from random weights")
	}
	return e.Try("fetch the files named *.safetensors")
}

// Lack says why weights that are meant cannot be read: shards that are missing, a download that has
// not ended, a form that is not read, a repository whose weights were not fetched, or a
// configuration that is named alone beside weights. It is nil for a model that has its weights, and
// for one that has none, as a preset. Whoever would begin such a model from random weights must be
// asked to by name.
func (m *Model) Lack() error {
	if m.lack == nil {
		return nil
	}
	return m.lack
}

// some prints the first names of a list.
func some(names []string) string {
	const most = 3
	text := strings.Join(names[:min(len(names), most)], ", ")
	if len(names) > most {
		text += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return text
}

// Contents is what the files of a model hold.
type Contents struct {
	Files   int   `json:"files"`
	Tensors int   `json:"tensors"`
	Bytes   int64 `json:"bytes"` // of all files; of the tensors alone where the index says it
	// Types counts tensors by element type; empty for an index without files.
	Types map[string]int `json:"types,omitempty"`
	// Missing lists the files that the index names and the folder has not.
	Missing []string `json:"missing,omitempty"`
	// Unused lists tensors that no parameter is made of and that are known to be of no use: angles
	// of rotary positions, masks, and an output layer that is the table of tokens.
	Unused []string `json:"unused,omitempty"`
	// MTP lists tensors of layers behind the last, which predict further tokens (DeepSeek-V3's
	// multi-token prediction). They are not part of the model that is trained.
	MTP []string `json:"mtp,omitempty"`
	// Leftover lists all others.
	Leftover []string `json:"leftover,omitempty"`
	// Scanned says that the numbers were looked at, and NotFinite which tensors hold some that are
	// infinite or NaN. [Model.NotFinite] looks; opening a model does not.
	Scanned   bool      `json:"scanned"`
	NotFinite []Damaged `json:"not_finite,omitempty"`
}

// Contents lists what the model's files hold; nil without files.
func (m *Model) Contents() *Contents {
	if m.Program != nil && m.lack != nil {
		return nil
	}
	if m.Program != nil {
		return m.Program.contents()
	}
	if len(m.tensors) == 0 {
		return nil
	}
	c := &Contents{Tensors: len(m.tensors), Bytes: m.size, Missing: slices.Clone(m.Missing)}
	s := m.sort()
	c.Unused, c.MTP, c.Leftover = s.unused, s.mtp, slices.Concat(s.beside, s.left)
	if m.weights == nil {
		return c
	}
	c.Bytes, c.Types = 0, map[string]int{}
	for _, f := range m.weights.Files() {
		c.Files++
		c.Bytes += f.Bytes
	}
	for _, name := range m.tensors {
		if s, err := m.weights.Shape(name); err == nil {
			c.Types[s.Type.String()]++
		}
	}
	return c
}

// DType is the element type of the tensors: bf16, or 24 bf16, 2 f32 where there are several, the
// most frequent first; "" where only an index is here.
func (c *Contents) DType() string {
	types := slices.Sorted(maps.Keys(c.Types))
	if len(types) == 1 {
		return types[0]
	}
	lists.Sort(types, func(a, b string) int { return c.Types[b] - c.Types[a] })
	for i, t := range types {
		types[i] = fmt.Sprintf("%s %s", human.Thousands(int64(c.Types[t])), t)
	}
	return strings.Join(types, ", ")
}

// sorted are the tensors that no parameter is made of.
type sorted struct {
	unused []string // known to be of no use
	mtp    []string // of layers behind the last
	beside []string // beside a tensor that is used, in the same layer
	left   []string
}

func (m *Model) sort() sorted {
	used, layers := map[string]bool{}, map[string]bool{}
	for _, p := range m.Config.Params() {
		for _, name := range p.Tensors() {
			names, _ := m.spelled(name)
			for _, spelled := range names {
				used[spelled] = true
				layers[owner(spelled)] = true
			}
		}
	}
	var s sorted
	for _, name := range m.tensors {
		switch {
		case used[name] || len(used) == 0:
		case m.useless(name):
			s.unused = append(s.unused, name)
		case m.furtherLayer(name):
			s.mtp = append(s.mtp, name)
		case layers[owner(name)]:
			s.beside = append(s.beside, name)
		default:
			s.left = append(s.left, name)
		}
	}
	return s
}

// owner is the layer that a tensor belongs to.
func owner(tensor string) string {
	if i := strings.LastIndexByte(tensor, '.'); i >= 0 {
		return tensor[:i]
	}
	return ""
}

// mtpKey is config.json's key of layers that predict further tokens.
const mtpKey = "num_nextn_predict_layers"

// furtherLayer reports whether a tensor belongs to a layer that predicts further tokens: it is
// numbered as if it came behind the last.
func (m *Model) furtherLayer(name string) bool {
	_, rest, ok := strings.Cut(name, "layers.")
	number, _, _ := strings.Cut(rest, ".")
	layer, err := strconv.ParseInt(number, 10, 64)
	return ok && err == nil && m.Config.Arch == "deepseek_v3" && layer >= m.Config.Layers
}

// useless knows tensors that older versions of transformers saved and newer ones skip.
func (m *Model) useless(name string) bool {
	switch {
	case strings.HasSuffix(name, ".rotary_emb.inv_freq"):
		return true
	case m.Config.Tied && (name == "lm_head.weight" || strings.HasSuffix(name, ".lm_head.weight")):
		return true
	}
	return m.Config.Arch == "gpt2" &&
		(strings.HasSuffix(name, ".attn.bias") || strings.HasSuffix(name, ".attn.masked_bias"))
}
