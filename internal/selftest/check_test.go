package selftest

import (
	"fmt"
	"testing"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/program"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const devices = 8

func cpu(t *testing.T) *engine.Engine {
	return enginetest.Open(t, engine.Options{Devices: devices}).Engine
}

func TestCollectives(t *testing.T) {
	n, err := Collectives(t.Context(), cpu(t), devices)
	if err != nil {
		t.Fatal(err)
	}
	// 3 that move x 6 payloads + 2 that add x 3 payloads, each over 8 devices and over two halves.
	if want := (3*len(payloads) + 2*3) * 2; n != want {
		t.Errorf("%d programs were run, want %d", n, want)
	}
}

// A wrong expectation must be noticed: otherwise the check above says nothing.
func TestCollectivesNoticeAWrongAnswer(t *testing.T) {
	e := cpu(t)
	for _, c := range collectives {
		good := c.want
		c.want = func(m int, all [][]row) []row {
			rows := append([]row(nil), good(m, all)...)
			rows[0] = append(row(nil), rows[0]...)
			rows[0][rowLen-1]++
			return rows
		}
		if err := c.run(t.Context(), e, payloads[0], devices, devices); err == nil {
			t.Errorf("%s: a wrong element was not noticed", c.name)
		}
	}
}

func TestHalvesAtTheSameTime(t *testing.T) {
	if err := Halves(t.Context(), cpu(t), devices, 300); err != nil {
		t.Fatal(err)
	}
}

func TestHandler(t *testing.T) {
	n, err := Handler(t.Context(), cpu(t), devices, 800)
	if err != nil || n < 800 {
		t.Errorf("%d calls, %v", n, err)
	}
}

// blackwell are the GPUs whose programs must call cuDNN's block-scaled GEMM.
var blackwell = gpus()

// gpus are all Blackwells, or one of each kind where time is short.
func gpus() []string {
	if !slowtest.Enabled {
		return []string{"b200", "rtx6000pro"}
	}
	return []string{"b200", "gb200", "b300", "gb300", "rtx6000pro"}
}

func compile(t *testing.T, c *engine.Compiler, build func(int) *program.Module, gpu string,
	n int) *engine.Report {
	t.Helper()
	return enginetest.Report(t, c, build(n), fmt.Sprintf("%dx%s", n, gpu))
}

func plansOf(r *engine.Report) map[string]hlo.Plan {
	plans := map[string]hlo.Plan{}
	for _, c := range r.CustomCalls {
		plans[c.Target] = c.Plan
	}
	return plans
}

func TestMXFP8CompilesForEveryBlackwell(t *testing.T) {
	with, without := enginetest.GPUCompiler(t, false), enginetest.GPUCompiler(t, true)
	const call = "__cudnn$blockScaledDot"
	for _, gpu := range blackwell {
		bare := compile(t, without, MXFP8, gpu, 8)
		if plansOf(bare)[call] != hlo.PlanMissing {
			t.Errorf("%s: cuDNN was withheld, and the report says %v", gpu, plansOf(bare))
		}
		for _, n := range []int{8, 1024, 65536} {
			r := compile(t, with, MXFP8, gpu, n)
			if plansOf(r)[call] != hlo.PlanCompiled {
				t.Errorf("%d x %s: %v", n, gpu, plansOf(r))
			}
			// The plan itself is tens of kilobytes inside the program.
			if r.ExecutableBytes < bare.ExecutableBytes+8<<10 {
				t.Errorf("%d x %s: the program has %d bytes, %d without cuDNN: no plan inside", n, gpu,
					r.ExecutableBytes, bare.ExecutableBytes)
			}
			if len(r.Collectives) != 1 || r.Collectives[0].Group.Size != int64(n) || r.Collectives[0].Bytes() != 4096*16384*2 {
				t.Errorf("%d x %s: collectives %v", n, gpu, r.Collectives)
			}
			t.Logf("%6d x %-10s %.2f s, temp %d, peak %d, program %d bytes", n, gpu, r.Seconds,
				r.Memory.Temp, r.Memory.Peak, r.ExecutableBytes)
		}
	}
}

func TestAttentionCompilesForEveryBlackwell(t *testing.T) {
	with, without := enginetest.GPUCompiler(t, false), enginetest.GPUCompiler(t, true)
	for _, gpu := range blackwell {
		r, bare := compile(t, with, Attention, gpu, 8), compile(t, without, Attention, gpu, 8)
		for _, call := range []string{"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} {
			if plansOf(r)[call] != hlo.PlanCompiled || plansOf(bare)[call] != hlo.PlanMissing {
				t.Errorf("%s: %s is %v with cuDNN and %v without", gpu, call, plansOf(r)[call], plansOf(bare)[call])
			}
		}
		if r.Memory.Temp <= bare.Memory.Temp {
			t.Errorf("%s: temp %d with cuDNN, %d without: its workspace is missing", gpu, r.Memory.Temp, bare.Memory.Temp)
		}
		t.Logf("%-10s temp %d with cuDNN, %d without", gpu, r.Memory.Temp, bare.Memory.Temp)
	}
}
