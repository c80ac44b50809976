package softgpu_test

import (
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/program"
)

// shapeT is the letter that stands for the shape of the arguments.
var shapeT = regexp.MustCompile(`\bT\b`)

// smallPrograms reads testdata/programs.txt: the text of a module by name, and the names in order.
func smallPrograms(t *testing.T) (names []string, texts map[string]string) {
	t.Helper()
	text, err := os.ReadFile("testdata/programs.txt")
	if err != nil {
		t.Fatal(err)
	}
	texts = map[string]string{}
	for _, section := range strings.Split(string(text), "\n-- ")[1:] {
		name, body, _ := strings.Cut(section, " --\n")
		body = "module @m {\nfunc.func @main(%x: T, %b: T) -> T {\n" + body +
			"\nreturn %y : T\n}\n}"
		names = append(names, name)
		texts[name] = shapeT.ReplaceAllString(body, "tensor<64x96xf32>")
	}
	return names, texts
}

// runProgram gives the result of a program on an engine's first device.
func runProgram(t *testing.T, e *engine.Engine, text string) []float64 {
	t.Helper()
	values, err := tryProgram(t, e, text)
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func tryProgram(t *testing.T, e *engine.Engine, text string) ([]float64, error) {
	t.Helper()
	m := &program.Module{Name: "small", Devices: program.Range(0, 1), Text: text}
	x, err := e.Compile(t.Context(), m)
	if err != nil {
		return nil, err
	}
	defer x.Free()
	m = x.Module()
	var args []*engine.Array
	for a := range m.Args {
		arg, err := e.Place(m, m.Args[a], engine.Copied, func(int) ([]byte, error) {
			var v []float64
			for i := range m.Args[a].Global.Elements() {
				v = append(v, 3*math.Sin(float64(int(i)*(a+1))*0.37)+0.01)
			}
			return m.Args[a].Global.Type.Append(nil, v...), nil
		})
		if err != nil {
			return nil, err
		}
		defer arg.Free()
		args = append(args, arg)
	}
	r, err := x.Run(t.Context(), args...)
	if err != nil {
		return nil, err
	}
	defer r.Free()
	got, err := r.Results[0].Read(t.Context(), 0)
	return m.Results[0].Global.Type.Values(got), err
}

// difference gives the largest relative difference and where it is. What is small beside the
// largest element may be what is left of larger ones: its difference counts against them.
func difference(want, got []float64) (worst float64, at int) {
	large := 0.0
	for _, v := range want {
		large = max(large, math.Abs(v))
	}
	for i := range want {
		if d := math.Abs(want[i]-got[i]) / (0.01*large + math.Abs(want[i])); !(d <= worst) {
			worst, at = d, i
		}
	}
	return worst, at
}

// What XLA:GPU emits for small programs computes on the software GPU what XLA:CPU computes.
func TestProgramsComputeWhatTheCPUComputes(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{Memory: 256 << 20, Delay: 3, DelayMicroseconds: 50}) {
		return
	}
	gpu := open(t, engine.Options{})
	cpu, err := engine.Open(t.Context(), "cpu", engine.Options{})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(cpu.Close)
	names, texts := smallPrograms(t)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			want := runProgram(t, cpu, texts[name])
			got := runProgram(t, gpu, texts[name])
			most := 1e-4
			if name == "bf16" {
				most = 1e-2 // XLA:CPU keeps more than bf16 between operations
			}
			worst, at := difference(want, got)
			if !(worst <= most) {
				t.Errorf("element %d: %v on the GPU, %v on the CPU: relative difference %.2g", at,
					got[at], want[at], worst)
			} else {
				t.Logf("largest relative difference %.2g", worst)
			}
		})
	}
}
