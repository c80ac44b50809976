package ckpt

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

const (
	// maxName and maxRank are what the safetensors package reads.
	maxName = 4096
	maxRank = 64
)

// fileName is every name that a part file can have: a manifest has no business elsewhere.
var fileName = regexp.MustCompile(`^part-[0-9]{5}\.safetensors$`)

// hexSHA256 is a hash as manifests spell it.
var hexSHA256 = regexp.MustCompile(fmt.Sprintf("^[0-9a-f]{%d}$", 2*sha256.Size))

// damaged is the error of a checkpoint whose files contradict their manifest or its hash.
func damaged(format string, args ...any) *diag.Error {
	return diag.New(diag.CheckpointDamaged, format, args...)
}

// checkName refuses names that a safetensors header or a terminal could not hold.
func checkName(name string) error {
	switch {
	case name == "" || name == "__metadata__":
		return fmt.Errorf("no tensor can be called %s", human.Quote(name))
	case len(name) > maxName:
		return fmt.Errorf("a name has %d bytes; at most %d are held", len(name), maxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("the name %s is not printable UTF-8", human.Quote(name))
	}
	return nil
}

// check finds contradictions. It is the same before writing and after reading, so that nothing is
// written that could not be read.
func (m *Manifest) check() error {
	if m.Version != version {
		return fmt.Errorf("version %d instead of %d", m.Version, version)
	}
	if m.Step < 0 || m.Step > maxStep {
		return fmt.Errorf("step %d is not between 0 and %d", m.Step, int64(maxStep))
	}
	if err := m.checkMeta(); err != nil {
		return err
	}
	files := map[string]*File{}
	for i, f := range m.Files {
		switch {
		case !fileName.MatchString(f.Name):
			return fmt.Errorf("%s is not the name of a part file", human.Quote(f.Name))
		case i > 0 && m.Files[i-1].Name >= f.Name:
			return fmt.Errorf("the files are not in order at %s", f.Name)
		case f.Header < 8 || f.Bytes < f.Header:
			return fmt.Errorf("%s: a header of %d bytes in a file of %d", f.Name, f.Header, f.Bytes)
		case !hexSHA256.MatchString(f.SHA256):
			return fmt.Errorf("%s: %s is not a SHA-256", f.Name, human.Quote(f.SHA256))
		}
		files[f.Name] = &m.Files[i]
	}
	for i, t := range m.Tensors {
		if i > 0 && m.Tensors[i-1].Name >= t.Name {
			return fmt.Errorf("the tensors are not in order at %s", human.Quote(t.Name))
		}
		if err := t.check(files, m.partial); err != nil {
			return err
		}
	}
	return m.checkTiles()
}

// checkMeta refuses text that is not UTF-8 and random states that are missing.
func (m *Manifest) checkMeta() error {
	names := slices.Concat(slices.Collect(maps.Keys(m.Data)), slices.Collect(maps.Keys(m.Random)),
		slices.Collect(maps.Keys(m.Extra)), []string{m.Recipe})
	for name, print := range m.Programs {
		names = append(names, name, print)
	}
	for _, name := range names {
		if !utf8.ValidString(name) {
			return fmt.Errorf("%s is not UTF-8", human.Quote(name))
		}
	}
	for name, state := range m.Random {
		if state == nil {
			return fmt.Errorf("the random state %s is missing", human.Quote(name))
		}
	}
	for name, raw := range m.Extra {
		if len(raw) == 0 {
			return fmt.Errorf("extra %s is empty", human.Quote(name))
		}
	}
	for _, raw := range append(slices.Collect(maps.Values(m.Extra)), m.Engine, m.Model) {
		if len(raw) > 0 && (!json.Valid(raw) || !utf8.Valid(raw)) {
			return errors.New("engine, model or extra is not JSON in UTF-8")
		}
	}
	return nil
}

// check demands that the parts are well formed and cover the tensor, each element once; parts of
// one writer need not cover it.
func (t *Stored) check(files map[string]*File, partial bool) error {
	if err := checkTensor(t.Tensor); err != nil {
		return err
	}
	covered := int64(0)
	for i, p := range t.Parts {
		if err := t.checkBox(p.Box); err != nil {
			return err
		}
		f := files[p.File]
		switch {
		case f == nil:
			return fmt.Errorf("tensor %s: %s is not among the files", human.Quote(t.Name),
				human.Quote(p.File))
		case p.Bytes != t.sized(p.Size) || p.Bytes == 0:
			return fmt.Errorf("tensor %s: part %v has %d bytes", human.Quote(t.Name), p.Box, p.Bytes)
		case p.Offset < f.Header || p.Offset > f.Bytes || p.Bytes > f.Bytes-p.Offset:
			return fmt.Errorf("tensor %s: part %v is outside %s", human.Quote(t.Name), p.Box, p.File)
		case !hexSHA256.MatchString(p.SHA256):
			return fmt.Errorf("tensor %s: %s is not a SHA-256", human.Quote(t.Name), human.Quote(p.SHA256))
		case i > 0 && slices.Compare(t.Parts[i-1].Start, p.Start) >= 0:
			return fmt.Errorf("tensor %s: its parts are not in order at %v", human.Quote(t.Name), p.Box)
		}
		covered += p.Bytes
		if covered > t.Bytes() {
			return fmt.Errorf("tensor %s: its parts overlap", human.Quote(t.Name))
		}
	}
	if a, b, ok := t.collision(); ok {
		return fmt.Errorf("tensor %s: parts %v and %v overlap", human.Quote(t.Name), a, b)
	}
	if covered != t.Bytes() && !partial {
		return fmt.Errorf("tensor %s: its parts hold %d of %d bytes", human.Quote(t.Name), covered,
			t.Bytes())
	}
	return nil
}

// collision finds two parts that share an element. It sweeps along the dimension that is split most
// often, so that a grid of n parts takes about n^1.5 comparisons and not n².
func (t *Stored) collision() (a, b Box, found bool) {
	if len(t.Parts) < 2 {
		return Box{}, Box{}, false
	}
	along, most := 0, 0
	for d := range t.Shape {
		starts := lists.Set(lists.Map(t.Parts, func(p Part) int64 { return p.Start[d] }))
		if len(starts) > most {
			along, most = d, len(starts)
		}
	}
	boxes := lists.Map(t.Parts, func(p Part) Box { return p.Box })
	lists.Sort(boxes, func(a, b Box) int { return cmp.Compare(a.Start[along], b.Start[along]) })
	var open []Box
	for _, b := range boxes {
		open = slices.DeleteFunc(open, func(a Box) bool {
			return a.Start[along]+a.Size[along] <= b.Start[along]
		})
		for _, a := range open {
			if _, ok := overlap(a, b); ok {
				return a, b, true
			}
		}
		open = append(open, b)
	}
	return Box{}, Box{}, false
}

// checkTiles demands that header and parts fill each file: then the hashes cover every byte.
func (m *Manifest) checkTiles() error {
	parts := map[string][]Part{}
	for _, t := range m.Tensors {
		for _, p := range t.Parts {
			parts[p.File] = append(parts[p.File], p)
		}
	}
	for _, f := range m.Files {
		lists.Sort(parts[f.Name], func(a, b Part) int { return cmp.Compare(a.Offset, b.Offset) })
		at := f.Header
		for _, p := range parts[f.Name] {
			if p.Offset != at {
				return fmt.Errorf("%s: a part begins at byte %d instead of %d", f.Name, p.Offset, at)
			}
			at += p.Bytes
		}
		if at != f.Bytes {
			return fmt.Errorf("%s: %d of its bytes belong to no part", f.Name, f.Bytes-at)
		}
	}
	return nil
}
