package softgpu_test

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/program"
)

// Each GPU holds a matrix of this many rows and columns.
const rows, cols = 8, 6

// A collective is an operation of StableHLO on the matrix x of every one of 8 GPUs, and what GPU r
// must get: want says which number stands at i.
type collective struct {
	name string
	rows int64 // of the result
	text string
	want func(x func(gpu, i int) float64, r, i int) float64
}

// region is the body of a reduction.
func region(op, element string) string {
	return fmt.Sprintf(`({
      ^bb0(%%a: tensor<%s>, %%b: tensor<%[1]s>):
        %%c = stablehlo.%s %%a, %%b : tensor<%[1]s>
        stablehlo.return %%c : tensor<%[1]s>
    })`, element, op)
}

const (
	everyone = "replica_groups = dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>"
	parities = "replica_groups = dense<[[0,2,4,6],[1,3,5,7]]> : tensor<2x4xi64>"
	halves   = "replica_groups = dense<[[0,1,2,3],[4,5,6,7]]> : tensor<2x4xi64>"
	ring     = "source_target_pairs = dense<[[0,1],[1,2],[2,3],[3,4],[4,5],[5,6],[6,7],[7,0]]>" +
		" : tensor<8x2xi64>"
)

func collectives(element string) []collective {
	return []collective{
		{"sum", rows, `"stablehlo.all_reduce"(%x) ` + region("add", element) + " {" + everyone + "}",
			func(x func(gpu, i int) float64, _, i int) (sum float64) {
				for gpu := range 8 {
					sum += x(gpu, i)
				}
				return sum
			}},
		{"maximum", rows, `"stablehlo.all_reduce"(%x) ` + region("maximum", element) +
			" {" + parities + "}",
			func(x func(gpu, i int) float64, r, i int) float64 {
				return max(x(r%2, i), x(r%2+2, i), x(r%2+4, i), x(r%2+6, i))
			}},
		{"gather", 4 * rows, `"stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, ` + halves + "}",
			func(x func(gpu, i int) float64, r, i int) float64 {
				return x(r/4*4+i/(rows*cols), i%(rows*cols))
			}},
		{"scatter", rows / 8, `"stablehlo.reduce_scatter"(%x) ` + region("add", element) +
			" {scatter_dimension = 0 : i64, " + everyone + "}",
			func(x func(gpu, i int) float64, r, i int) (sum float64) {
				for gpu := range 8 {
					sum += x(gpu, r*cols+i)
				}
				return sum
			}},
		{"exchange", rows, `"stablehlo.all_to_all"(%x) {split_dimension = 0 : i64,` +
			` concat_dimension = 0 : i64, split_count = 8 : i64, ` + everyone + "}",
			func(x func(gpu, i int) float64, r, i int) float64 { return x(i/cols, r*cols+i%cols) }},
		{"permute", rows, `"stablehlo.collective_permute"(%x) {` + ring + "}",
			func(x func(gpu, i int) float64, r, i int) float64 { return x((r+7)%8, i) }},
	}
}

// collectiveModule has every collective of x as a result. The mesh shards all of them, so that
// each GPU's part can be read.
func collectiveModule(t dtype.DType, element string) *program.Module {
	shape := func(rows int64) dtype.Shape {
		return dtype.Shape{Type: t, Dims: []int64{8 * rows, cols}}
	}
	split := [][]string{{"dp"}, nil}
	m := &program.Module{Name: "collectives", Devices: program.Range(0, 8),
		Mesh: []program.Axis{{Name: "dp", Size: 8}},
		Args: []program.Array{{Name: "x", Global: shape(rows), Split: split}}}
	var body strings.Builder
	var names, types []string
	in := fmt.Sprintf("tensor<%dx%dx%s>", rows, cols, element)
	for _, c := range collectives(element) {
		out := fmt.Sprintf("tensor<%dx%dx%s>", c.rows, cols, element)
		fmt.Fprintf(&body, "    %%%s = %s : (%s) -> %s\n", c.name, c.text, in, out)
		names, types = append(names, "%"+c.name), append(types, out)
		m.Results = append(m.Results, program.Array{Name: c.name, Global: shape(c.rows), Split: split})
	}
	m.Text = fmt.Sprintf(`module @collectives attributes {mhlo.num_replicas = 8 : i32} {
  func.func @main(%%x: %s) -> (%s) {
%s    return %s : %s
  }
}`, in, strings.Join(types, ", "), body.String(), strings.Join(names, ", "),
		strings.Join(types, ", "))
	return m
}

// playCollectives runs the module several times without waiting in between and checks every number
// of the GPUs of this process, of which first is the lowest.
func playCollectives(t *testing.T, e *engine.Engine, first, runs int) {
	t.Helper()
	// All processes must play the types in the same order.
	for _, typ := range []dtype.DType{dtype.F32, dtype.BF16, dtype.S32} {
		element := typ.MLIR()
		m := collectiveModule(typ, element)
		executable, err := e.Compile(t.Context(), m)
		if err != nil {
			t.Fatalf("%s: %v", element, err)
		}
		var all []*engine.Run
		for run := range runs {
			x, err := e.Place(m, m.Args[0], engine.Copied, func(i int) ([]byte, error) {
				var v []float64
				for k := range rows * cols {
					v = append(v, number(run, i, k))
				}
				return typ.Append(nil, v...), nil
			})
			if err != nil {
				t.Fatal(err)
			}
			r, err := executable.Run(t.Context(), x)
			if err != nil {
				t.Fatal(err)
			}
			x.Free()
			all = append(all, r)
		}
		for run, r := range all {
			checkCollectives(t, r, element, run, first)
			r.Free()
		}
	}
}

// number is element k of a GPU's x, so small that no sum is rounded, not even in bf16.
func number(run, gpu, k int) float64 { return float64((run*5 + gpu*3 + k*7) % 13) }

func checkCollectives(t *testing.T, r *engine.Run, element string, run, first int) {
	t.Helper()
	if err := r.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := func(gpu, i int) float64 { return number(run, gpu, i) }
	for k, c := range collectives(element) {
		for part := range r.Results[k].Parts() {
			bytes, err := r.Results[k].Read(t.Context(), part)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Results[k].Spec().Global.Type.Values(bytes)
			var want []float64
			for i := range int(c.rows) * cols {
				want = append(want, c.want(x, first+part, i))
			}
			if !slices.Equal(got, want) {
				t.Errorf("run %d, %s of %s on GPU %d:\n%v, not\n%v", run, c.name, element, first+part,
					got, want)
			}
		}
	}
}

func TestCollectivesOfEightGPUs(t *testing.T) {
	for delay := range uint64(3) {
		t.Run(fmt.Sprint("delay", delay), func(t *testing.T) {
			if !softgpu.Child(t, softgpu.Options{GPUs: 8, Memory: 64 << 20, Delay: delay,
				Env: []string{"SOFTGPU_NCCL_TIMEOUT=120"}}) {
				return
			}
			playCollectives(t, open(t, engine.Options{}), 0, 8)
		})
	}
}

// Collectives can be captured in a CUDA graph, which runs them again and again: calls of a graph meet
// by their place in it and by how often it ran.
func TestCollectivesInGraphs(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	if !softgpu.Child(t, softgpu.Options{GPUs: 8, Memory: 64 << 20, Delay: 4, Log: log,
		Flags: map[string]string{"xla_gpu_enable_command_buffer": "FUSION,COLLECTIVES",
			"xla_gpu_graph_min_graph_size": "1"},
		Env: []string{"SOFTGPU_NCCL_TIMEOUT=120"}}) {
		text, err := os.ReadFile(log)
		if err != nil || !strings.Contains(string(text), "nccl: captured") {
			t.Errorf("no call was captured (%v)", err)
		}
		return
	}
	playCollectives(t, open(t, engine.Options{}), 0, 8)
}

// Two processes with 4 GPUs each are one client.
func TestCollectivesOfTwoProcesses(t *testing.T) {
	if softgpu.InChild(t) {
		node, err := strconv.Atoi(os.Getenv("SOFTGPU_TEST_NODE"))
		if err != nil {
			t.Fatal(err)
		}
		e := open(t, engine.Options{Node: node, Nodes: 2,
			Store: folder(os.Getenv("SOFTGPU_TEST_STORE"))})
		playCollectives(t, e, 4*node, 4)
		return
	}
	shared, store := t.TempDir(), t.TempDir()
	var both sync.WaitGroup
	for node := range 2 {
		both.Go(func() {
			out, status := softgpu.Run(t, softgpu.Options{GPUs: 4, Memory: 64 << 20, Fabric: "one",
				Delay: uint64(node + 1), Env: []string{"SOFTGPU_NCCL_TIMEOUT=120",
					"SOFTGPU_NCCL_DIR=" + shared, "SOFTGPU_TEST_STORE=" + store,
					fmt.Sprint("SOFTGPU_TEST_NODE=", node)}})
			if status != 0 {
				t.Errorf("process %d ends with status %d\n%s", node, status, out)
			}
		})
	}
	both.Wait()
}

// A folder is a key-value store for processes of one host: a file for each key.
type folder string

func (f folder) path(key string) string {
	return filepath.Join(string(f), hex.EncodeToString([]byte(key)))
}

func (f folder) Get(key string, timeout time.Duration) ([]byte, error) {
	for end := time.Now().Add(timeout); ; time.Sleep(2 * time.Millisecond) {
		if value, err := f.TryGet(key); err == nil {
			return value, nil
		}
		if time.Now().After(end) {
			return nil, os.ErrDeadlineExceeded
		}
	}
}

func (f folder) TryGet(key string) ([]byte, error) { return os.ReadFile(f.path(key)) }

func (f folder) Put(key string, value []byte) error {
	draft, err := os.CreateTemp(string(f), "draft")
	if err != nil {
		return err
	}
	_, err = draft.Write(bytes.Clone(value))
	if shut := draft.Close(); err == nil {
		err = shut
	}
	if err != nil {
		return err
	}
	return os.Rename(draft.Name(), f.path(key))
}
