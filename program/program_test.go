package program

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
)

func f32(dims ...int64) dtype.Shape { return dtype.Shape{Type: dtype.F32, Dims: dims} }

// sample is a step on a mesh of 2 x 4 that updates a weight in place.
func sample() *Program {
	return &Program{Name: "step", Modules: []Module{{
		Name: "update", Devices: Range(0, 8),
		Mesh: []Axis{{"fsdp", 2}, {"tp", 4}},
		Args: []Array{
			{Name: "w", Global: f32(16, 8), Split: [][]string{{"fsdp"}, {"tp"}}, Into: "w"},
			{Name: "lr", Global: f32()},
			{Name: "m", Global: f32(16, 8), Split: [][]string{{"fsdp", "tp"}, nil}, Memory: "pinned_host"},
		},
		Results: []Array{{Name: "w", Global: f32(16, 8), Split: [][]string{{"fsdp"}, {"tp"}}}},
		Flags:   map[string]any{"xla_gpu_enable_triton_gemm": false, "xla_cpu_x": "1"},
		Text:    "module @step {\n}\n",
	}}}
}

func TestFileRoundTrip(t *testing.T) {
	b, err := sample().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	const path = "testdata/v1.program"
	old := golden.Compare(t, path, b)
	got, err := Parse(old)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample(), got); diff != "" {
		t.Error(diff)
	}
}

func TestParseRefusesByName(t *testing.T) {
	good, err := sample().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	edit := func(old, new string) string { return strings.Replace(string(good), old, new, 1) }
	for name, c := range map[string]struct {
		file string
		code diag.Code
	}{
		"empty":        {"", diag.ProgramFormat},
		"other file":   {"module {}\n", diag.ProgramFormat},
		"version 9":    {edit("program 1", "program 9"), diag.ProgramVersion},
		"no json":      {edit("-- program.json --", "-- other.json --"), diag.ProgramFormat},
		"bad json":     {edit(`"name"`, `"nam"`), diag.ProgramFormat},
		"no text":      {edit("-- update.mlir --", "-- x.mlir --"), diag.ProgramFormat},
		"extra text":   {string(good) + "-- x.mlir --\n", diag.ProgramFormat},
		"twice":        {string(good) + "-- update.mlir --\n", diag.ProgramFormat},
		"mesh size":    {edit(`"size": 2`, `"size": 3`), diag.ProgramInvalid},
		"odd shard":    {edit("f32[16,8]", "f32[15,8]"), diag.ProgramInvalid},
		"unknown axis": {edit(`"tp"`, `"tq"`), diag.ProgramInvalid},
		"bad devices":  {edit(`"0-7"`, `"7-0"`), diag.ProgramFormat},
		"twice device": {edit(`"0-7"`, `"0-6,3"`), diag.ProgramInvalid},
		"no such into": {edit(`"into": "w"`, `"into": "v"`), diag.ProgramInvalid},
	} {
		_, err := Parse([]byte(c.file))
		if !errors.Is(err, c.code) {
			t.Errorf("%s: %v, want %s", name, err, c.code)
		}
	}
}

// The shards of an array must cover it: every element once for each copy.
func TestShardsCoverTheArray(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := Module{Name: "s", Text: "x"}
		n := 1
		for _, name := range []string{"a", "b", "c"}[:rapid.IntRange(1, 3).Draw(t, "axes")] {
			size := rapid.IntRange(1, 4).Draw(t, name)
			m.Mesh = append(m.Mesh, Axis{name, size})
			n *= size
		}
		m.Devices = Range(0, n)
		a := Array{Name: "x", Global: f32(24, 24), Split: [][]string{nil, nil}}
		copies := n
		for _, axis := range m.Mesh {
			d := rapid.IntRange(-1, 1).Draw(t, "dim of "+axis.Name)
			if d >= 0 {
				a.Split[d] = append(a.Split[d], axis.Name)
				copies /= axis.Size
			}
		}
		local, err := m.Local(a)
		if err != nil {
			t.Skip("sizes do not divide")
		}
		seen := make([]int, 24*24)
		for i := range n {
			start, err := m.Start(a, i)
			if err != nil {
				t.Fatal(err)
			}
			for r := range local.Dims[0] {
				for c := range local.Dims[1] {
					seen[(start[0]+r)*24+start[1]+c]++
				}
			}
		}
		for k, times := range seen {
			if times != copies {
				t.Fatalf("element %d is held %d times, want %d", k, times, copies)
			}
		}
	})
}

func TestDevicesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := Devices(rapid.SliceOfDistinct(rapid.IntRange(0, 300), rapid.ID[int]).Draw(t, "devices"))
		var got Devices
		err := got.UnmarshalText([]byte(d.String()))
		if err != nil || !cmp.Equal([]int(d), []int(got), cmp.Transformer("nil", func(x []int) string { return fmt.Sprint(x) })) {
			t.Fatalf("%v came back as %v: %v", d, got, err)
		}
	})
	if got := Range(0, 100_000).String(); got != "0-99999" {
		t.Errorf("100,000 devices are %q", got)
	}
}

// XLA tells 1 from 1.0, so a whole number must come back as one.
func TestFlagsKeepTheirKind(t *testing.T) {
	p := sample()
	want := map[string]any{"a": int64(1), "b": 0.5, "c": true, "d": "x", "e": int64(1) << 53}
	p.Modules[0].Flags = want
	b, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got.Modules[0].Flags); diff != "" {
		t.Error(diff)
	}
}

func TestValidateRefuses(t *testing.T) {
	for name, change := range map[string]func(*Module){
		"negative device":   func(m *Module) { m.Devices[0] = -5 },
		"mesh of size 0":    func(m *Module) { m.Mesh[0].Size = 0 },
		"overflowing mesh":  func(m *Module) { m.Mesh = []Axis{{"a", 7}, {"b", 7905747460161236407}} },
		"one name twice":    func(m *Module) { m.Args[1].Name = "w" },
		"one result twice":  func(m *Module) { m.Results = append(m.Results, m.Results[0]) },
		"no text":           func(m *Module) { m.Text = " " },
		"a name with slash": func(m *Module) { m.Name = "a/b" },
	} {
		m := &sample().Modules[0]
		change(m)
		if err := m.Validate(); !errors.Is(err, diag.ProgramInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, text := range []string{"0,0-9223372036854775807", "0-1048576", "-1", "3-1", "a"} {
		var d Devices
		if d.UnmarshalText([]byte(text)) == nil {
			t.Errorf("%q gave %d devices", text, len(d))
		}
	}
}

func FuzzParse(f *testing.F) {
	good, err := sample().Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte("deepwell program 1\n-- program.json --\n{}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse(data)
		if err != nil {
			return
		}
		again, err := p.Marshal()
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if _, err := Parse(again); err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
	})
}

func ExampleModule_Start() {
	m := sample().Modules[0]
	start, _ := m.Start(m.Args[0], 5) // device 5 is at fsdp 1, tp 1
	fmt.Println(start)
	// Output: [8 2]
}
