package ckpt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
)

const (
	// version is the only form of manifest that this package writes.
	version      = 1
	manifestName = "manifest.json"
	// maxManifest bounds what is read into memory: about a million parts.
	maxManifest = 256 << 20
)

// A Manifest says everything about a checkpoint but the tensors' bytes.
type Manifest struct {
	Version int   `json:"version"`
	Step    int64 `json:"step"` // steps that were done
	Meta
	Files   []File   `json:"files"`   // by name
	Tensors []Stored `json:"tensors"` // by name

	partial bool // the share of one writer: its parts need not cover a tensor
}

// A Meta is what a run needs beside its tensors to go on as if it had never stopped.
type Meta struct {
	// Data is the position in each source of data, by name.
	Data map[string]int64 `json:"data,omitempty"`
	// Seed is what the run's random numbers began with, and Random the state of each generator
	// that has one.
	Seed   uint64            `json:"seed"`
	Random map[string][]byte `json:"random,omitempty"`
	// Programs holds the fingerprint of each program that the run executes.
	Programs map[string]string `json:"programs,omitempty"`
	// Recipe is the text of the recipe that the run follows.
	Recipe string `json:"recipe,omitempty"`
	// Engine and Model describe what ran and what was trained, as the packages that know them
	// print it: a checkpoint is exported with nothing else at hand.
	Engine json.RawMessage `json:"engine,omitempty"`
	Model  json.RawMessage `json:"model,omitempty"`
	// Extra is for what later versions add and older ones may ignore; it is kept as it is.
	Extra map[string]json.RawMessage `json:"extra,omitempty"`
}

// A File is one part file.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	Header int64  `json:"header"` // bytes before the first tensor
	SHA256 string `json:"sha256"` // of the header; the rest of the file is parts
}

// A Stored is a tensor and the parts that cover it, each element once.
type Stored struct {
	Tensor
	Parts []Part `json:"parts"`
}

// A Part is one box of a tensor in one file.
type Part struct {
	Box
	File   string `json:"file"`
	Offset int64  `json:"offset"` // from the beginning of the file
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// Bytes is the size of all part files.
func (m *Manifest) Bytes() int64 {
	return lists.Sum(m.Files, func(f File) int64 { return f.Bytes })
}

// Encode prints the manifest: the same manifest always gives the same bytes. One that contradicts
// itself is refused.
func (m *Manifest) Encode() ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, diag.New(diag.CheckpointTensor, "%s", err)
	}
	text, err := m.print()
	if err != nil {
		return nil, diag.New(diag.CheckpointTensor, "%s", err)
	}
	return text, nil
}

// print writes one member a line, and one part a line: two manifests can be compared by eye. The
// last member seals all bytes before it.
func (m *Manifest) print() ([]byte, error) {
	p := &printer{}
	p.line("{")
	p.member("version", m.Version, false)
	p.member("step", m.Step, false)
	p.member("data", m.Data, len(m.Data) == 0)
	p.member("seed", m.Seed, false)
	p.member("random", m.Random, len(m.Random) == 0)
	p.member("programs", m.Programs, len(m.Programs) == 0)
	p.member("recipe", m.Recipe, m.Recipe == "")
	p.member("engine", m.Engine, len(m.Engine) == 0)
	p.member("model", m.Model, len(m.Model) == 0)
	p.member("extra", m.Extra, len(m.Extra) == 0)
	p.line(`"files": [`)
	for i, f := range m.Files {
		p.value(f)
		p.end(i, len(m.Files))
	}
	p.line("],")
	p.line(`"tensors": [`)
	for i, t := range m.Tensors {
		p.b.WriteString(`{"name":`)
		p.value(t.Name)
		fmt.Fprintf(&p.b, `,"dtype":"%v","shape":%s,"parts":[`, t.DType, dtype.List(t.Shape))
		for j, part := range t.Parts {
			fmt.Fprintf(&p.b, "\n"+` {"start":%s,"size":%s,"file":"%s","offset":%d,"bytes":%d,`+
				`"sha256":"%s"}`, dtype.List(part.Start), dtype.List(part.Size), part.File, part.Offset,
				part.Bytes, part.SHA256)
			if j < len(t.Parts)-1 {
				p.b.WriteByte(',')
			}
		}
		p.b.WriteString("]}")
		p.end(i, len(m.Tensors))
	}
	p.line("],")
	if p.err != nil {
		return nil, p.err
	}
	sum := sha256.Sum256(p.b.Bytes())
	p.b.WriteString(seal(sum))
	return p.b.Bytes(), nil
}

// seal is the end of every manifest of every version.
func seal(sum [sha256.Size]byte) string {
	return `"sha256": "` + hex.EncodeToString(sum[:]) + "\"\n}\n"
}

// A printer keeps its first error.
type printer struct {
	b   bytes.Buffer
	err error
}

// line, member and end print one member or list element per line: diff shows which tensor changed.
func (p *printer) line(s string) { p.b.WriteString(s + "\n") }

func (p *printer) member(name string, v any, skip bool) {
	if skip {
		return
	}
	p.b.WriteString(`"` + name + `": `)
	p.value(v)
	p.line(",")
}

// value writes compact JSON; raw JSON loses its spaces, so that it has one form.
func (p *printer) value(v any) {
	enc := json.NewEncoder(&p.b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil && p.err == nil {
		p.err = err
	}
	p.b.Truncate(len(bytes.TrimRight(p.b.Bytes(), "\n")))
}

func (p *printer) end(i, n int) {
	if i < n-1 {
		p.b.WriteByte(',')
	}
	p.b.WriteByte('\n')
}

// parseManifest reads what Encode prints, and nothing else: a doubled, unknown or misspelled
// member does not come back as it was read, and every byte is under the seal. A partial one is the
// share of one writer.
func parseManifest(text []byte, partial bool) (*Manifest, error) {
	if err := unsealed(text); err != nil {
		return nil, err
	}
	// The manifest's own fields stop at the seal, which is not a member of the struct.
	var doc struct {
		*Manifest
		Seal string `json:"sha256"`
	}
	var probe struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &probe); err != nil {
		return nil, damaged("the manifest is not well formed").Because("%s", err)
	}
	if probe.Version != version {
		return nil, diag.New(diag.CheckpointVersion,
			"the checkpoint has version %d; this binary reads %d", probe.Version, version).
			Try("use the Deepwell that wrote it, or a newer one")
	}
	doc.Manifest = &Manifest{partial: partial}
	if err := strictjson.Decode(text, &doc); err != nil {
		return nil, damaged("the manifest is not well formed").Because("%s", err)
	}
	m := doc.Manifest
	if err := m.check(); err != nil {
		return nil, damaged("%s", err)
	}
	again, err := m.print()
	if err != nil || !bytes.Equal(again, text) {
		return nil, damaged("the manifest is not in the form that Deepwell prints").
			Because("line %d differs", firstLine(text, again))
	}
	return m, nil
}

// unsealed says what is wrong with the end of a manifest, if anything.
func unsealed(text []byte) error {
	length := len(seal([sha256.Size]byte{}))
	switch {
	case len(text) > maxManifest:
		return damaged("the manifest has %d bytes; at most %d are read", len(text), maxManifest)
	case len(text) < length:
		return damaged("the manifest is truncated: it has %d bytes", len(text))
	case !utf8.Valid(text):
		return damaged("the manifest is not UTF-8")
	}
	body := text[:len(text)-length]
	if want := seal(sha256.Sum256(body)); string(text[len(body):]) != want {
		return damaged("the manifest is truncated or was changed").
			Because("its last member is not the SHA-256 of what stands before it")
	}
	return nil
}

// firstLine is the number of the first line in which two manifests differ.
func firstLine(a, b []byte) int {
	n := 1
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			break
		}
		if a[i] == '\n' {
			n++
		}
	}
	return n
}

// clone is a deep copy of what a caller could change afterwards; raw JSON is brought into one form.
func (m Meta) clone() (Meta, error) {
	m.Data, m.Programs = maps.Clone(m.Data), maps.Clone(m.Programs)
	m.Random = maps.Clone(m.Random)
	for name, state := range m.Random {
		m.Random[name] = slices.Clone(state)
	}
	var err error
	if m.Engine, err = compact("engine", m.Engine); err != nil {
		return m, err
	}
	if m.Model, err = compact("model", m.Model); err != nil {
		return m, err
	}
	m.Extra = maps.Clone(m.Extra)
	for name, raw := range m.Extra {
		if m.Extra[name], err = compact("extra."+name, raw); err != nil {
			return m, err
		}
	}
	return m, nil
}

// compact removes blanks from JSON of another package, so that its bytes are determined.
func compact(name string, raw json.RawMessage) (json.RawMessage, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		return nil, diag.New(diag.CheckpointTensor, "%s is not JSON", name).Wrap(err)
	}
	return b.Bytes(), nil
}
