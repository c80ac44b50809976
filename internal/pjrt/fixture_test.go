package pjrt

import (
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/machine"
)

// The optimized programs that package hlo is tested on were written by these engines. Compiling
// their sources again must give the same account, or the fixtures no longer tell the truth. Bytes
// are not compared: a schedule is a map, and its order changes from run to run.
func TestFixturesOfHLOAreStillTrue(t *testing.T) {
	base := map[string]any{"xla_gpu_autotune_level": 0, "xla_gpu_shard_autotuning": false,
		"xla_gpu_enable_triton_gemm": false}
	planned := map[string]any{"xla_gpu_cudnn_deviceless_compilation_mode": "CUDNN_DEVICELESS_COMPILATION_AUTO"}
	pipelined := map[string]any{
		"xla_gpu_pipeline_all_gather":          "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
		"xla_gpu_collective_domain_assignment": "scale_up_fabric"}
	for _, f := range []struct {
		file, source string
		replicas     int
		flags        map[string]any
	}{
		{"cpu_branch", "branch", 8, nil},
		{"cpu_combined", "combined", 8, nil},
		{"cpu_exchange", "exchange", 8, nil},
		{"cpu_loop", "loop", 8, nil},
		{"b200_branch", "branch", 8, nil},
		{"b200_combined", "combined", 8, nil},
		{"b200_exchange", "exchange", 8, nil},
		{"b200_mxfp8_8", "mxfp8", 8, nil},
		{"b200_mxfp8_1024", "mxfp8", 1024, nil},
		{"b200_nvfp4", "nvfp4", 1, nil},
		{"b200_attention", "attention", 1, nil},
		{"b200_attention_plan", "attention", 1, planned},
		{"b200_pipelined", "loop", 8, pipelined},
	} {
		t.Run(f.file, func(t *testing.T) {
			want := fixture(t, f.file)
			text := source(t, f.source, f.replicas)
			o := CompileOptions{Flags: maps.Clone(f.flags)}
			for i := range f.replicas {
				o.Devices = append(o.Devices, i)
			}
			var got *hlo.Module
			if strings.HasPrefix(f.file, "cpu_") {
				got = compileCPU(t, text, o)
			} else {
				flags := maps.Clone(base)
				maps.Copy(flags, f.flags)
				o.Flags = flags
				got = compileB200(t, text, o)
			}
			if diff := cmp.Diff(account(want), account(got)); diff != "" {
				t.Errorf("the account has changed (-fixture +now):\n%s", diff)
			}
		})
	}
}

type row struct {
	What, Group, Shape string
	Count, In, Out     int64
	Async              bool
}

// account is what must stay: names and the order of the schedule may change.
func account(m *hlo.Module) map[row]int {
	rows := map[row]int{}
	for _, c := range m.Collectives() {
		rows[row{string(c.Kind), c.Group.String(), c.Shape, c.Count, c.OperandBytes, c.ResultBytes, c.Async}]++
	}
	for _, c := range m.CustomCalls() {
		rows[row{c.Target, c.Plan.String(), "", c.Count, c.OperandBytes, c.ResultBytes + c.Workspace, false}]++
	}
	for _, p := range m.Params {
		rows[row{What: "param", Shape: p.Text, In: p.Bytes}]++
	}
	for _, a := range m.Aliases {
		rows[row{What: "alias", In: int64(a.Param), Out: int64(a.Result)}]++
	}
	return rows
}

func fixture(t *testing.T, name string) *hlo.Module {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "hlo", "testdata", name+".hlo"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := hlo.Read("hlo_with_config", b)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// source reads a program and fills in the number of replicas and the group of all of them.
func source(t *testing.T, name string, replicas int) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "hlo", "testdata", "source", name+".mlir"))
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]string, replicas)
	for i := range ids {
		ids[i] = strconv.Itoa(i)
	}
	text := strings.ReplaceAll(string(b), "$N", strconv.Itoa(replicas))
	return []byte(strings.ReplaceAll(text, "$GROUP", "[["+strings.Join(ids, ",")+"]]"))
}

func compileCPU(t *testing.T, text []byte, o CompileOptions) *hlo.Module {
	t.Helper()
	x, err := newCPU(t, len(o.Devices)).Compile(text, o)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	m, err := x.Optimized()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func compileB200(t *testing.T, text []byte, o CompileOptions) *hlo.Module {
	t.Helper()
	p, b := real(t, "cuda13")
	o.Flags["xla_gpu_cuda_data_dir"] = b.DataDir
	cluster, err := machine.ParseCluster(strconv.Itoa(len(o.Devices)) + "xb200")
	if err != nil {
		t.Fatal(err)
	}
	target := cluster
	topology, err := p.NewTopology([]Option{{"target_config", target.ConfigText(b.CuDNN)}, {"topology", target.Topology()}})
	if err != nil {
		t.Fatal(err)
	}
	defer topology.Free()
	x, err := topology.Compile(text, o)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	m, err := x.Optimized()
	if err != nil {
		t.Fatal(err)
	}
	return m
}
