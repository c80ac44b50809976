package ckpt

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

func v1(t testing.TB) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "v1", stepName(120), manifestName))
	must(t, err)
	return text
}

// A manifest whose seal fits but that lies is refused in bounded time, with a reason.
func TestHostileManifests(t *testing.T) {
	good := string(v1(t))
	for name, c := range map[string]struct{ from, to, says string }{
		"not an object":      {"{\n", "[\n", "not well formed"},
		"doubled member":     {`"step": 120,`, `"step": 119,` + "\n" + `"step": 120,`, "form that Deepwell prints"},
		"case of a member":   {`"step":`, `"Step":`, "form that Deepwell prints"},
		"unknown member":     {`"step":`, `"more": 1,` + "\n" + `"step":`, "unknown field"},
		"spaces":             {`"step": 120`, `"step":  120`, "line 3 differs"},
		"null list":          {`"shape":[12,4]`, `"shape":null`, "a box of 2 by 2 numbers for f32[]"},
		"a float":            {`"step": 120`, `"step": 1.5`, "not well formed"},
		"an exponent":        {`"step": 120`, `"step": 1e3`, "not well formed"},
		"a huge number":      {`"step": 120`, `"step": 18446744073709551616`, "not well formed"},
		"negative step":      {`"step": 120`, `"step": -1`, "step -1"},
		"file above":         {`"name":"part-00000.safetensors"`, `"name":"../x.safetensors"`, "not the name of a part file"},
		"absolute file":      {`"name":"part-00000.safetensors"`, `"name":"/etc/passwd"`, "not the name of a part file"},
		"other file":         {`"file":"part-00000.safetensors"`, `"file":"part-00001.safetensors"`, "not among the files"},
		"dtype":              {`"dtype":"f32"`, `"dtype":"f33"`, "f33"},
		"shape overflow":     {`"shape":[12,4]`, `"shape":[4611686018427387904,16]`, "shape that memory could hold"},
		"overflow beside 0":  {`"shape":[0,3]`, `"shape":[0,4611686018427387904]`, "shape that memory could hold"},
		"negative dimension": {`"shape":[12,4]`, `"shape":[-12,-4]`, "shape that memory could hold"},
		"shape too small":    {`"shape":[12,4]`, `"shape":[6,4]`, "12 elements from 0"},
		"shape too large":    {`"shape":[12,4]`, `"shape":[13,4]`, "hold 192 of 208 bytes"},
		"box outside":        {`"start":[0,0],"size":[12,4]`, `"start":[1,0],"size":[12,4]`, "12 elements from 1"},
		"box overflow":       {`"start":[0,0],"size":[12,4]`, `"start":[9223372036854775807,0],"size":[12,4]`, "elements from"},
		"box rank":           {`"start":[0,0],"size":[12,4]`, `"start":[0],"size":[12,4]`, "box of 1 by 2"},
		"box too small":      {`"start":[0,0],"size":[12,4]`, `"start":[0,0],"size":[11,4]`, "has 192 bytes"},
		"half a byte":        {`"shape":[3,4]`, `"shape":[3,5]`, "splits a byte"},
		"offset outside":     {`"offset":456`, `"offset":4560`, "is outside"},
		"offset in header":   {`"offset":456`, `"offset":0`, "is outside"},
		"tensors unsorted":   {`{"name":"embed"`, `{"name":"zebra"`, "not in order"},
		"empty name":         {`{"name":"block.q.0"`, `{"name":""`, "no tensor can be called"},
		"control character":  {`{"name":"embed"`, `{"name":"em\nbed"`, "not printable"},
		"metadata's name":    {`{"name":"block.q.0"`, `{"name":"__metadata__"`, "no tensor can be called"},
		"raw not compact":    {`{"layers":2}`, `{"layers": 2}`, "form that Deepwell prints"},
		"extra deep":         {`[1,null]`, strings.Repeat("[", 20000) + strings.Repeat("]", 20000), "depth"},
	} {
		if !strings.Contains(good, c.from) {
			t.Errorf("%s: %q is not in the manifest", name, c.from)
			continue
		}
		_, err := parseManifest(reseal([]byte(strings.Replace(good, c.from, c.to, 1))), false)
		if !errors.Is(err, diag.CheckpointDamaged) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %q", name, err, c.says)
		}
	}
}

// change edits a good manifest and demands that both the printer and the parser refuse it.
func TestContradictionsAreNotWritten(t *testing.T) {
	for name, change := range map[string]func(m *Manifest){
		"overlap in file": func(m *Manifest) { m.Tensors[0].Parts[0].Offset = m.Tensors[1].Parts[0].Offset },
		"hole at the end": func(m *Manifest) { m.Files[0].Bytes += 8 },
		"short hash":      func(m *Manifest) { m.Tensors[0].Parts[0].SHA256 = "abc" },
		"upper-case hash": func(m *Manifest) { m.Files[0].SHA256 = strings.Repeat("A", 64) },
		"file twice":      func(m *Manifest) { m.Files = append(m.Files, m.Files[0]) },
		"part twice":      func(m *Manifest) { p := &m.Tensors[1].Parts; *p = append(*p, (*p)[0]) },
		"no parts":        func(m *Manifest) { m.Tensors[0].Parts = nil },
		"header of 0":     func(m *Manifest) { m.Files[0].Header = 0 },
		"recipe bytes":    func(m *Manifest) { m.Recipe = "\xff" },
		"version":         func(m *Manifest) { m.Version = 2 },
		"random state":    func(m *Manifest) { m.Random["dropout"] = nil },
	} {
		m, err := parseManifest(v1(t), false)
		must(t, err)
		change(m)
		if text, err := m.Encode(); err == nil {
			t.Errorf("%s: written as\n%s", name, text)
		}
		if text, err := m.print(); err == nil {
			if _, err := parseManifest(text, false); err == nil {
				t.Errorf("%s: read", name)
			}
		}
	}
}

// A grid of very many parts is checked in less than quadratic time.
func TestManyParts(t *testing.T) {
	const rows, columns = 64, 512
	s := Stored{Tensor: Tensor{"w", 8, []int64{rows, columns}}}
	for r := range int64(rows) {
		for c := range int64(columns) {
			s.Parts = append(s.Parts, Part{Box: Box{[]int64{r, c}, []int64{1, 1}}})
		}
	}
	if _, _, found := s.collision(); found {
		t.Error("a grid collides")
	}
	s.Parts = append(s.Parts, Part{Box: Box{[]int64{rows - 1, 0}, []int64{1, columns}}})
	if _, _, found := s.collision(); !found {
		t.Error("a row over a grid does not collide")
	}
}

func FuzzManifest(f *testing.F) {
	text := v1(f)
	f.Add(text, false)
	f.Add(text[:300], true)
	f.Add([]byte("{\n"), true)
	f.Fuzz(func(t *testing.T, text []byte, sealed bool) {
		// A seal that fits lets the fuzzer past the first gate.
		if sealed && len(text) >= len(seal([32]byte{})) {
			text = reseal(text)
		}
		m, err := parseManifest(text, false)
		if err != nil {
			if e := diag.From(err); e.Code != diag.CheckpointDamaged && e.Code != diag.CheckpointVersion {
				t.Fatalf("code %s: %v", e.Code, e)
			}
			return
		}
		again, err := m.Encode()
		if err != nil || !bytes.Equal(again, text) {
			t.Fatalf("%v\n%s\n%s", err, text, again)
		}
	})
}
